//! The program `cargo xtask`. All of its code is in the library, because the package `image` uses
//! parts of it.

use std::process::ExitCode;

fn main() -> ExitCode {
    xtask::main()
}
