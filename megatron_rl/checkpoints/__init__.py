"""How does a run go on where it stopped?"""
