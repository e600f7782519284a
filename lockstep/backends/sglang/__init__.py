"""SGLang, over its HTTP server. Not run against real SGLang: tests speak its documented API with a server of their own."""
