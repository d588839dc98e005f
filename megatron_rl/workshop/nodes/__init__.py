"""Whether the nodes of a job are what its recipe needs: looked at by each, judged by the first, before models load."""
