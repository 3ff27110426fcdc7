//! Tests of the sources themselves: how comments and documents are written, which modules import
//! which, how large files and folders are, and that generated pages are current. They need no root.
//!
//! What does not keep a rule yet is listed in `exceptions.txt`, which can only become shorter.
//! These two commands write the list and the pages:
//!
//!     cargo test -p xtask --test rules -- --ignored write_exceptions
//!     cargo test -p xtask --test rules -- --ignored write_pages
#![expect(clippy::unwrap_used, reason = "a test that cannot read the sources has failed")]

mod exceptions;
mod layers;
mod pages;
mod paths;
mod prose;
mod purity;
mod sizes;
mod tree;
