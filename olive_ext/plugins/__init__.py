"""Plug-ins: each package here can be removed alone, and the core imports none (`olive_ext.registry`)."""
