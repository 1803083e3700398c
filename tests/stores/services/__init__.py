"""Object stores on loopback: S3, GCS and Azure as their own emulators speak them, started once in a test run."""
