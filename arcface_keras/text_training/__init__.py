"""Titles are trained and embedded as photos are: an encoder of BERT type, any head, the same run folder."""
