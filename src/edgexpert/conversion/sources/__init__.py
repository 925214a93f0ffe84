"""Where weights come from. Every source gives them under the names and in the shapes of the transformers model."""
