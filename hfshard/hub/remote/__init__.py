"""The Hugging Face Hub over HTTP: requests, uploads, downloads, and its cache on this machine."""
