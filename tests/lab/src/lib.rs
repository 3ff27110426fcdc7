//! A small cluster in network namespaces.
