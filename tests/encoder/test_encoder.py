from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, BertConfig, BertModel

from edgexpert.core.errors import UserError
from edgexpert.encoder import ImportanceEncoder
from edgexpert.encoder.encoder import BUNDLED, WINDOW
from edgexpert.encoder.quantise import WEIGHTS, load, write

SENTENCE = "Once upon a time, a little fox lived in the green forest."
# Measured with the float32 sentence-transformers/all-MiniLM-L6-v2 on SENTENCE, in percent.
FLOAT_ATTENTION = {
    "Once": 4.403, "upon": 5.165, "a": 3.240, "time": 6.623, ",": 2.909, "little": 9.722, "fox": 22.797, "lived": 4.225,
    "in": 3.363, "the": 3.568, "green": 12.142, "forest": 15.077, ".": 3.512,
}


@pytest.fixture(scope="module")
def encoder() -> ImportanceEncoder:
    return ImportanceEncoder.bundled()


@pytest.fixture
def tiny_bert(tmp_path: Path) -> Path:
    """A random BERT of one layer whose windows hold 30 tokens, with the bundled tokenizer."""
    torch.manual_seed(0)
    config = BertConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=30522,
                        max_position_embeddings=32)
    BertModel(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((BUNDLED / name).read_bytes())
    return tmp_path


def words(text: str) -> list[tuple[int, int]]:
    """Spans of words, each with the blank before it, as byte-level tokenizers cut them."""
    ends = [i for i in range(1, len(text)) if text[i] == " "] + [len(text)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def test_bundled_attention_is_that_of_the_float_original(encoder: ImportanceEncoder) -> None:
    spans = [(SENTENCE.index(word), SENTENCE.index(word) + len(word)) for word in FLOAT_ATTENTION]
    percent = 100 * encoder.weigh(SENTENCE, spans)
    torch.testing.assert_close(percent, torch.tensor(list(FLOAT_ATTENTION.values())), atol=0.3, rtol=0)


def test_attention_over_the_whole_text_sums_to_one_in_one_window_and_in_many(encoder: ImportanceEncoder) -> None:
    for text in (SENTENCE, " ".join([SENTENCE] * 30)):
        weights = encoder.weigh(text, words(text))
        assert float(weights.sum()) == pytest.approx(1, abs=1e-4)
        assert bool((weights > 0).all())


def test_windows_of_a_long_text_are_comparable(encoder: ImportanceEncoder) -> None:
    text = " ".join([SENTENCE] * 40)
    share = encoder.weigh(text, words(text)).view(40, 12).sum(1)  # of each of forty equal sentences, over five windows
    assert bool((share > 0.4 / 40).all())
    assert bool((share < 2.5 / 40).all())


def test_white_space_gets_nothing_and_a_token_without_text_the_most(encoder: ImportanceEncoder) -> None:
    text = "a fox\n\n ran"
    begin, fox, blank, ran = encoder.weigh(text, [(0, 0), (1, 5), (5, 8), (8, 11)])
    assert blank == 0
    assert begin == max(fox, ran) > 0


def test_an_empty_text_weighs_nothing(encoder: ImportanceEncoder) -> None:
    before = encoder.bytes_read
    assert encoder.weigh("", [(0, 0), (0, 0)]).tolist() == [0, 0]
    assert encoder.weigh(" \n", []).tolist() == []
    assert encoder.bytes_read == before


def test_windows_overlap_by_half_and_cover_everything(encoder: ImportanceEncoder) -> None:
    full = WINDOW - 2
    assert encoder._windows(full) == [(0, full)]
    assert encoder._windows(600) == [(0, 254), (127, 381), (254, 508), (346, 600)]
    for length in range(1, 1200, 37):
        windows = encoder._windows(length)
        assert {end - start for start, end in windows} == {min(length, full)}
        assert set().union(*(range(*window) for window in windows)) == set(range(length))


def test_bytes_read_count_every_window_and_only_the_embedding_rows_it_looks_up(encoder: ImportanceEncoder) -> None:
    before = encoder.bytes_read
    encoder.weigh("fox", [(0, 3)])
    one = encoder.bytes_read - before
    # Six layers of 12 x 384 x 384 values of 16 bits, and vectors; three tokens' rows of three tables.
    matrices = 6 * 12 * 384 * 384 * 2
    assert matrices < one < matrices * 1.02
    before = encoder.bytes_read
    encoder.weigh("fox " * 600, [(0, 3)])
    assert encoder.bytes_read - before == pytest.approx(4 * one, rel=0.1)


def test_a_folder_with_short_positions_is_read_in_short_windows(tiny_bert: Path) -> None:
    encoder = ImportanceEncoder.from_pretrained(str(tiny_bert))
    assert encoder.name == tiny_bert.name
    text = "fox " * 100
    assert float(encoder.weigh(text, [(0, len(text))])) == pytest.approx(1, abs=1e-4)
    assert encoder._windows(100)[0] == (0, 30)


def test_a_packed_encoder_gives_nearly_the_attention_of_the_float_one(tmp_path: Path) -> None:
    folder = tmp_path / "float"
    config = AutoConfig.from_pretrained(BUNDLED)
    torch.manual_seed(0)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BUNDLED / name, folder / name)
    write(folder, tmp_path / "packed")
    exact = ImportanceEncoder.from_pretrained(str(folder))
    ours = ImportanceEncoder(load(tmp_path / "packed"), exact._tokenizer, "packed")
    text = "the fox and the crow met under an old tree, and it rained all day long"
    spans = [(i, min(i + 4, len(text))) for i in range(0, len(text), 4)]
    torch.testing.assert_close(ours.weigh(text, spans), exact.weigh(text, spans), rtol=0.02, atol=1e-3)
    assert (tmp_path / "packed" / WEIGHTS).stat().st_size < (folder / WEIGHTS).stat().st_size * 0.4


def test_an_encoder_that_is_not_there_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="give its folder"):
        ImportanceEncoder.from_pretrained(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match=r"no config\.json; give the folder of a BERT-like encoder"):
        ImportanceEncoder.from_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be loaded by transformers; give the folder"):
        ImportanceEncoder.from_pretrained(str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="give its folder"):
        ImportanceEncoder.from_pretrained("nobody/no-such-encoder")


def test_a_tokenizer_without_cls_is_refused(tiny_bert: Path) -> None:
    (tiny_bert / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match="CLS and SEP"):
        ImportanceEncoder.from_pretrained(str(tiny_bert))
