"""From messages to token ids and back: tokenizer, renderer, streaming parser, stop strings. No torch."""
