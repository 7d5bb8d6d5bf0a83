"""Running untrusted programs under namespaces, resource limits and a supervisor."""
