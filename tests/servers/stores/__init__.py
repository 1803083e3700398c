"""Object stores on loopback: S3, GCS and Azure by their emulators, the Hub by ours, started once in a test run."""
