//! Tests of the sources themselves, such as how comments and documents are written. They need no
//! root.
//!
//! What does not keep a rule yet is listed in `exceptions.txt`, which can only become shorter. This
//! command writes the list:
//!
//!     cargo test -p xtask --test rules -- --ignored write_exceptions
#![expect(clippy::unwrap_used, reason = "a test that cannot read the sources has failed")]

mod exceptions;
mod paths;
mod prose;
mod purity;
mod tree;
