//! The object that the repository has, and what it was made of.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, bail};

use crate::{
    compile::Toolchain,
    sources,
    strip::{Lines, strip},
};

/// The path of the object in the workspace.
pub const OBJECT: &str = "proxy-ebpf/object/proxy-ebpf.o";
/// The path in the workspace of the file that says what the object was made of.
pub const MADE_OF: &str = "proxy-ebpf/object/made-of.txt";

/// The object in the repository.
#[derive(Debug, Eq, PartialEq)]
pub struct Committed {
    pub bytes: Vec<u8>,
    pub made_of: MadeOf,
}

/// The sources and the tools of an object.
#[derive(Debug, Eq, PartialEq)]
pub struct MadeOf {
    /// See [`sources::hash`].
    pub sources: String,
    pub tools: Tools,
}

/// Versions of compiler and linker. Others may make another object of the same sources.
#[derive(Debug, Eq, PartialEq)]
pub struct Tools {
    pub compiler: String,
    pub linker: String,
}

impl Tools {
    /// Names both, for `proxy-ctl --version`.
    pub fn describe(&self) -> String {
        format!("{}, {}", self.compiler, self.linker)
    }
}

impl MadeOf {
    fn parse(text: &str) -> Result<Self> {
        let field = |name: &str| {
            let mut fields = text.lines().filter_map(|line| line.split_once(": "));
            let found = fields.find_map(|(field, value)| (field == name).then(|| value.to_owned()));
            found
                .with_context(|| format!("{MADE_OF} has no line `{name}: …`; `cargo xtask object` writes it"))
        };
        Ok(Self {
            sources: field("sources")?,
            tools: Tools { compiler: field("compiler")?, linker: field("linker")? },
        })
    }

    fn to_text(&self) -> String {
        let Self { sources, tools: Tools { compiler, linker } } = self;
        format!(
            "# What proxy-ebpf.o is made of. Written by `cargo xtask object`.\n\
             sources: {sources}\ncompiler: {compiler}\nlinker: {linker}\n"
        )
    }
}

impl Committed {
    /// Reads what the repository has. `None`: it has none.
    pub fn read(workspace: &Path) -> Result<Option<Self>> {
        let (object, made_of) = (workspace.join(OBJECT), workspace.join(MADE_OF));
        if !object.exists() || !made_of.exists() {
            return Ok(None);
        }
        let text = fs::read_to_string(&made_of).with_context(|| format!("reading {}", made_of.display()))?;
        let bytes = fs::read(&object).with_context(|| format!("reading {}", object.display()))?;
        Ok(Some(Self { bytes, made_of: MadeOf::parse(&text)? }))
    }

    /// Compiles the sources and strips the object. `built` is any path below cargo's target folder.
    pub fn compile(toolchain: &Toolchain, workspace: &Path, built: &Path) -> Result<Self> {
        let sources = sources::hash(workspace)?;
        let bytes = strip(&toolchain.compile(workspace, built)?, Lines::Remove)?;
        if sources::hash(workspace)? != sources {
            bail!("the sources were changed while they were compiled");
        }
        Ok(Self { bytes, made_of: MadeOf { sources, tools: toolchain.tools()? } })
    }

    /// Writes both files.
    pub fn write(&self, workspace: &Path) -> Result<()> {
        for (name, content) in [(OBJECT, self.bytes.as_slice()), (MADE_OF, self.made_of.to_text().as_bytes())]
        {
            let path = workspace.join(name);
            fs::write(&path, content).with_context(|| format!("writing {}", path.display()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let tools =
            Tools { compiler: "rustc 1.96.0 (ac68)".to_owned(), linker: "bpf-linker 0.13.0".to_owned() };
        let made_of = MadeOf { sources: "ab12".to_owned(), tools };
        assert_eq!(MadeOf::parse(&made_of.to_text()).unwrap(), made_of);
    }

    #[test]
    fn a_line_that_is_missing_is_named() {
        let error = MadeOf::parse("sources: ab\ncompiler: rustc\n").unwrap_err();
        assert!(error.to_string().contains("no line `linker: …`"), "{error}");
    }
}
