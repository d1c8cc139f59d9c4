"""Extensions: each imports fshard by its public names and those of `fshard.extend`, and no other extension."""
