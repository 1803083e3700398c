"""Object stores and buckets: few and small promises, kept alike by S3, GCS, Azure and Hugging Face buckets."""
