//! The program `proxy-ctl`.

use std::process::ExitCode;

use mimalloc::MiMalloc;
use proxy_ctl::{profile::heap::HeapProfile, sys::allocator::Observed};

#[global_allocator]
static ALLOCATOR: Observed<MiMalloc, HeapProfile> = Observed::new(MiMalloc);

fn main() -> ExitCode {
    proxy_ctl::cli::main()
}
