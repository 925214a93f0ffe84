"""EdgeXpert: mixture-of-experts language models with speculative decoding, moving as few weight bytes as possible."""
