//! Offsets of the fields of the kernel's structs, and ids of its functions, from the BTF in
//! /sys/kernel/btf/vmlinux.

use std::{fs, io};

use crate::sys::net::netlink::word;

const PATH: &str = "/sys/kernel/btf/vmlinux";
const MAGIC: u32 = 0xeb9f;
const TYPE: usize = 12;
const MEMBER: usize = 12;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    Struct,
    Function,
}

/// A struct or a function of the kernel.
#[derive(Clone, Copy, Debug)]
struct Type<'a> {
    id: u32,
    kind: Kind,
    /// The string table from the name on.
    name: &'a [u8],
    members: &'a [u8],
}

/// All types of the kernel, as it describes them in BTF.
#[derive(Debug)]
pub struct KernelTypes {
    bytes: Vec<u8>,
}

impl KernelTypes {
    pub fn read() -> io::Result<Self> {
        Ok(Self { bytes: fs::read(PATH)? })
    }

    /// Returns the BTF id of a function, by which programs are attached to it.
    pub fn function(&self, name: &str) -> io::Result<u32> {
        let found = self.types().find(|found| found.kind == Kind::Function && is_name(found.name, name));
        found.map(|found| found.id).ok_or_else(|| missing(name))
    }

    /// Returns the offset of `member` in bytes from the beginning of the struct `of`.
    pub fn offset(&self, of: &str, member: &str) -> io::Result<u16> {
        let structs = self.types().filter(|found| found.kind == Kind::Struct && is_name(found.name, of));
        let offset = structs.flat_map(|found| found.members.chunks_exact(MEMBER)).find_map(|bytes| {
            let bits = word(bytes, 8)? & 0x00ff_ffff;
            is_name(self.names()?.get(word(bytes, 0)? as usize..)?, member).then_some(bits / 8)
        });
        offset.and_then(|offset| u16::try_from(offset).ok()).ok_or_else(|| missing(&format!("{of}.{member}")))
    }

    /// Returns a section. `at` is the position of two header fields: the section's start behind the
    /// header, and its length.
    fn section(&self, at: usize) -> Option<&[u8]> {
        if word(&self.bytes, 0)? & 0xffff != MAGIC {
            return None;
        }
        let start = word(&self.bytes, 4)?.checked_add(word(&self.bytes, at)?)?;
        self.bytes.get(start as usize..)?.get(..word(&self.bytes, at + 4)? as usize)
    }

    fn names(&self) -> Option<&[u8]> {
        self.section(16)
    }

    fn types(&self) -> impl Iterator<Item = Type<'_>> {
        let mut rest = self.section(8).unwrap_or_default();
        let names = self.names().unwrap_or_default();
        let mut id = 0;
        std::iter::from_fn(move || {
            loop {
                let (name, info) = (word(rest, 0)?, word(rest, 4)?);
                let (kind, count) = (info >> 24 & 0x1f, (info & 0xffff) as usize);
                let (found, follows) = rest.get(TYPE..)?.split_at_checked(length(kind, count)?)?;
                rest = follows;
                id += 1;
                let kind = match kind {
                    4 => Kind::Struct,
                    12 => Kind::Function,
                    _ => continue,
                };
                return Some(Type { id, kind, name: names.get(name as usize..)?, members: found });
            }
        })
    }
}

/// Returns the length of what follows a type of this kind. Returns `None` if the kind is newer than
/// this list.
fn length(kind: u32, count: usize) -> Option<usize> {
    Some(match kind {
        // These are integers, variables and tags of declarations.
        1 | 14 | 17 => 4,
        // These are arrays.
        3 => 12,
        // These are structs, unions, sections and enums of 64 bits.
        4 | 5 | 15 | 19 => count * 12,
        // These are enums and prototypes of functions.
        6 | 13 => count * 8,
        // These are pointers, forward declarations, typedefs, qualifiers, functions, floats and
        // tags of types.
        2 | 7..=12 | 16 | 18 => 0,
        _ => return None,
    })
}

/// Returns true if the zero-terminated string at the start of `bytes` is `name`. Most names differ
/// in their first bytes, so no length is measured and nothing is decoded.
fn is_name(bytes: &[u8], name: &str) -> bool {
    bytes.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.first() == Some(&0))
}

fn missing(name: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("{PATH} has no {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_and_functions_of_this_kernel_are_found() {
        let types = KernelTypes::read().unwrap();
        // These are the same in every kernel.
        assert_eq!(types.offset("list_head", "prev").unwrap(), 8);
        assert_eq!(types.offset("bpf_iter_meta", "session_id").unwrap(), 8);
        assert!(types.function("bpf_iter_bpf_sk_storage_map").unwrap() > 0);
        let missing = types.offset("sock", "no_such_field").unwrap_err();
        assert_eq!(missing.to_string(), "/sys/kernel/btf/vmlinux has no sock.no_such_field");
        assert!(types.function("no_such_function").is_err());
    }

    #[test]
    fn what_is_cut_off_or_not_of_this_kind_has_none() {
        let whole = KernelTypes::read().unwrap().bytes;
        for bytes in [&whole[..0], &whole[..20], &whole[..whole.len() / 2], &[0; 64]] {
            assert!(KernelTypes { bytes: bytes.to_vec() }.function("bpf_iter_bpf_sk_storage_map").is_err());
        }
    }
}
