"""The loss inside other people's trainers: `liger` (a drop-in), `transformers` (a patch of one model), `trl`.

Each module imports the library it serves when it is used, not before, and none is imported by `syncfree_ext` itself.
docs/trainers.md is the guide.
"""
