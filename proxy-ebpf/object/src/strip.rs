//! Removes from an object what only the linker uses.

use anyhow::{Context as _, Result};
use object::{
    build::elf::{Builder, SectionData},
    elf::SHT_STRTAB,
};

use crate::btf;

/// Says whether the lines of the source stay in the object.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Lines {
    Keep,
    Remove,
}

/// Returns an ELF object without debug information, without the relocations of it and of BTF, and,
/// if `lines` says so, without the lines of the source.
pub fn strip(bytes: &[u8], lines: Lines) -> Result<Vec<u8>> {
    let mut elf = Builder::read(bytes).context("reading the object")?;
    for section in &mut elf.sections {
        let is_for_linker = [".debug_", ".rel.debug_", ".rel.BTF"];
        section.delete |= is_for_linker.iter().any(|name| section.name.starts_with(name.as_bytes()));
    }
    if lines == Lines::Remove {
        remove_lines(&mut elf)?;
    }
    elf.delete_orphans();
    // bpf-linker keeps the names of sections and symbols in one section, which `Builder` cannot
    // write.
    let names = elf.sections.add();
    names.name = ".shstrtab".into();
    names.sh_type = SHT_STRTAB;
    names.data = SectionData::SectionString;
    let mut stripped = Vec::new();
    elf.write(&mut stripped).context("writing the object")?;
    Ok(stripped)
}

fn remove_lines(elf: &mut Builder<'_>) -> Result<()> {
    let (types, notes) = btf::without_lines(&content(elf, ".BTF")?, &content(elf, ".BTF.ext")?)?;
    for (name, new) in [(".BTF", types), (".BTF.ext", notes)] {
        for section in elf.sections.iter_mut().filter(|section| *section.name == *name.as_bytes()) {
            section.data = SectionData::Data(new.clone().into());
        }
    }
    Ok(())
}

fn content(elf: &Builder<'_>, name: &str) -> Result<Vec<u8>> {
    let section = elf.sections.iter().find(|section| *section.name == *name.as_bytes());
    match section.map(|section| &section.data) {
        Some(SectionData::Data(data)) => Ok(data.to_vec()),
        _ => anyhow::bail!("the object has no section {name}: it was linked without --btf"),
    }
}
