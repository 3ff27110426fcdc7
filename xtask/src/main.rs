//! `cargo xtask`. Everything is in the library, of which the package `image` uses parts.

use std::process::ExitCode;

fn main() -> ExitCode {
    xtask::main()
}
