//! The object in the repository is what its sources compile to.

use std::env;

use kernel_object::{
    committed::{Committed, OBJECT},
    compile::Toolchain,
    sources, workspace,
};

#[test]
fn the_object_in_the_repository_is_of_these_sources() {
    let workspace = workspace();
    let committed = Committed::read(&workspace).unwrap().expect("the repository has an object");
    assert_eq!(
        committed.made_of.sources,
        sources::hash(&workspace).unwrap(),
        "{OBJECT} is made of other sources: run `cargo xtask object` and commit what it writes"
    );
}

#[test]
fn the_object_in_the_repository_is_what_its_sources_compile_to() {
    let workspace = workspace();
    let committed = Committed::read(&workspace).unwrap().expect("the repository has an object");
    let Some(toolchain) = Toolchain::find() else {
        println!("skipped: the compiler or the linker for BPF is not installed");
        return;
    };
    let here = toolchain.tools().unwrap();
    if here != committed.made_of.tools {
        let (there, here) = (committed.made_of.tools.describe(), here.describe());
        println!("skipped: the object in the repository is made by {there}, this machine has {here}");
        return;
    }
    let compiled = Committed::compile(&toolchain, &workspace, &env::current_exe().unwrap()).unwrap();
    let differs = compiled.bytes.iter().zip(&committed.bytes).position(|(here, there)| here != there);
    assert!(
        compiled.bytes == committed.bytes,
        "{OBJECT} has {} bytes, its sources compile to {}; the first that differs: {differs:?}. \
         Run `cargo xtask object` and commit what it writes",
        committed.bytes.len(),
        compiled.bytes.len(),
    );
}
