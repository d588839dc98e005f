"""What do the processes of a run have in common?"""
