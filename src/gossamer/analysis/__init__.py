"""What can be said about a recipe or a model without training it."""
