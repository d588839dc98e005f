"""A folder of weights in one form, made into another form."""
