//! The tests are in `main.rs`: `cargo test -p packets`, as root.
