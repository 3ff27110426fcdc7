//! `cargo xtask object`: compiles the kernel programs and writes the object that the repository
//! has.

use std::{env, process::ExitCode};

use anyhow::{Context as _, Result};
use kernel_object::{
    committed::{Committed, MADE_OF, OBJECT},
    compile::Toolchain,
    workspace,
};

fn main() -> ExitCode {
    match write() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kernel-object: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn write() -> Result<()> {
    let toolchain = Toolchain::find().context("the BPF toolchain is missing: run `cargo xtask setup`")?;
    let built = env::current_exe().context("finding this program")?;
    let workspace = workspace();
    let committed = Committed::compile(&toolchain, &workspace, &built)?;
    committed.write(&workspace)?;
    println!("{OBJECT}: {} bytes", committed.bytes.len());
    println!("{MADE_OF}: {}", committed.made_of.tools.describe());
    Ok(())
}
