//! Tests of the sources themselves: how comments and documents are written, which modules import
//! which, and how large files and folders are. They need no root.
//!
//! What does not keep a rule yet is listed in `exceptions.txt`, which can only become shorter. This
//! command writes the list:
//!
//!     cargo test -p xtask --test rules -- --ignored write_exceptions
#![expect(clippy::unwrap_used, reason = "a test that cannot read the sources has failed")]

mod exceptions;
mod layers;
mod paths;
mod prose;
mod purity;
mod sizes;
mod tree;
