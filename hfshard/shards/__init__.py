"""Planning, reading and writing safetensors files."""
