"""Minutes of several writers and a reader beside a service that fails: no load fails, and no save is lost."""
