"""Backends run a model for the translator; [`~recnmt_hf.inference.backends.protocol.Backend`] is their base class."""
