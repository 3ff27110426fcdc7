//! Makes the type information (BTF) of an object small, and the same wherever it was compiled.
//!
//! The compiler notes for each instruction the file and the line of the source. aya copies these
//! notes for every function that it loads, 32 MB in all, and the names of the files are paths of
//! one machine. So the notes are removed, and with them the strings that nothing else names.
//!
//! Layouts: the kernel's Documentation/bpf/btf.rst. All numbers are little-endian.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};

/// A header's field with the length of the header itself, the same in both sections.
const HEADER_LENGTH: usize = 4;

/// Fields of the header of `.BTF`, each four bytes: where a part begins behind the header, and its
/// length.
mod types {
    pub(super) const OFFSET: usize = 8;
    pub(super) const LENGTH: usize = 12;
    pub(super) const STRINGS: usize = 16;
    pub(super) const STRINGS_LENGTH: usize = 20;
}

/// Fields of the header of `.BTF.ext`.
mod notes {
    pub(super) const FUNCTIONS: usize = 8;
    pub(super) const FUNCTIONS_LENGTH: usize = 12;
    pub(super) const LINES: usize = 16;
    pub(super) const LINES_LENGTH: usize = 20;
    pub(super) const RELOCATIONS: usize = 24;
    pub(super) const RELOCATIONS_LENGTH: usize = 28;
}

/// Returns the contents of `.BTF` and `.BTF.ext` without the lines of the source and their strings.
pub fn without_lines(btf: &[u8], ext: &[u8]) -> Result<(Vec<u8>, Vec<u8>)> {
    let ext = remove_lines(ext).context("section .BTF.ext")?;
    let header = number(btf, HEADER_LENGTH)?;
    let types = part(btf, header, types::OFFSET, types::LENGTH).context("types in section .BTF")?;
    let strings =
        part(btf, header, types::STRINGS, types::STRINGS_LENGTH).context("strings in section .BTF")?;
    // The first string is empty: what has no name names it.
    let mut kept = Strings { former: strings, places: BTreeMap::from([(0, 0)]), bytes: vec![0] };
    let mut new_types = types.to_vec();
    for at in names_in_types(types).context("types in section .BTF")? {
        kept.rename(&mut new_types, at)?;
    }
    let mut new_ext = ext.clone();
    for at in names_in_notes(&ext).context("section .BTF.ext")? {
        kept.rename(&mut new_ext, at)?;
    }
    let mut new_btf = btf.get(..header).context("the header of section .BTF")?.to_vec();
    for (field, value) in [
        (types::OFFSET, 0),
        (types::LENGTH, new_types.len()),
        (types::STRINGS, new_types.len()),
        (types::STRINGS_LENGTH, kept.bytes.len()),
    ] {
        set(&mut new_btf, field, value)?;
    }
    new_btf.extend(new_types);
    new_btf.extend(kept.bytes);
    Ok((new_btf, new_ext))
}

/// The strings that are still named, in the order in which they are first named.
struct Strings<'a> {
    former: &'a [u8],
    /// Maps the place of each kept string before to its place now.
    places: BTreeMap<usize, usize>,
    bytes: Vec<u8>,
}

impl Strings<'_> {
    /// Keeps the string whose place stands at `at`, and writes its new place there.
    fn rename(&mut self, data: &mut [u8], at: usize) -> Result<()> {
        let former = number(data, at)?;
        let place = match self.places.get(&former) {
            Some(place) => *place,
            None => {
                let rest = self.former.get(former..).with_context(|| format!("no string at {former}"))?;
                let length = rest.iter().position(|byte| *byte == 0).context("a string without its end")?;
                let place = self.bytes.len();
                self.bytes.extend(&rest[..=length]);
                self.places.insert(former, place);
                place
            }
        };
        set(data, at, place)
    }
}

/// Returns where in the types the places of strings stand. A type has a name, its kind and how many
/// members it has, and a size or another type; then come its members.
fn names_in_types(types: &[u8]) -> Result<Vec<usize>> {
    const TYPE: usize = 12;
    let mut names = Vec::new();
    let mut at = 0;
    while at < types.len() {
        names.push(at);
        let info = number(types, at + 4)?;
        let (kind, count) = ((info >> 24) & 0x1f, info & 0xffff);
        // The bytes that follow the type, and the length of a member if its first field is a name.
        let (following, member) = match kind {
            // Integers, variables, tags of declarations.
            1 | 14 | 17 => (4, None),
            // Pointers, declarations without a body, aliases, qualifiers, functions, floats, tags
            // of types.
            2 | 7..=12 | 16 | 18 => (0, None),
            // Arrays.
            3 => (12, None),
            // Structs, unions, and enums of 64 bits.
            4 | 5 | 19 => (12 * count, Some(12)),
            // Enums, and the parameters of functions.
            6 | 13 => (8 * count, Some(8)),
            // The variables of a section.
            15 => (12 * count, None),
            other => bail!("unknown kind of type {other} at {at}"),
        };
        let members = at + TYPE;
        if let Some(length) = member {
            names.extend((0..count).map(|number| members + number * length));
        }
        at = members + following;
    }
    ensure!(at == types.len(), "the last type is cut off");
    Ok(names)
}

/// Returns where in `.BTF.ext` the places of strings stand: for each section its name, and for each
/// relocation how the field is reached. Records of functions name no strings.
fn names_in_notes(ext: &[u8]) -> Result<Vec<usize>> {
    const ACCESS: usize = 8;
    let header = number(ext, HEADER_LENGTH)?;
    let mut names = Vec::new();
    for (offset, length, in_record) in [
        (notes::FUNCTIONS, notes::FUNCTIONS_LENGTH, None),
        (notes::RELOCATIONS, notes::RELOCATIONS_LENGTH, Some(ACCESS)),
    ] {
        let begin = header + number(ext, offset)?;
        let end = begin + part(ext, header, offset, length)?.len();
        if begin == end {
            continue;
        }
        let record = number(ext, begin)?;
        let mut at = begin + 4;
        while at < end {
            names.push(at);
            let count = number(ext, at + 4)?;
            let records = at + 8;
            if let Some(field) = in_record {
                names.extend((0..count).map(|number| records + number * record + field));
            }
            at = records + count * record;
        }
        ensure!(at == end, "the last record is cut off");
    }
    Ok(names)
}

/// Removes the part with lines, which stands between functions and relocations.
fn remove_lines(ext: &[u8]) -> Result<Vec<u8>> {
    let header = number(ext, HEADER_LENGTH)?;
    ensure!(header >= notes::RELOCATIONS_LENGTH + 4, "its header has {header} bytes only");
    let lines = part(ext, header, notes::LINES, notes::LINES_LENGTH)?;
    let begin = header + number(ext, notes::LINES)?;
    let relocations = number(ext, notes::RELOCATIONS)?;
    ensure!(
        relocations >= begin - header + lines.len(),
        "its relocations stand before the lines, where this program does not expect them"
    );
    let mut shorter = ext.to_vec();
    shorter.drain(begin..begin + lines.len());
    set(&mut shorter, notes::LINES_LENGTH, 0)?;
    set(&mut shorter, notes::RELOCATIONS, relocations - lines.len())?;
    Ok(shorter)
}

/// The part of a section whose place and length two fields of its header say.
fn part(section: &[u8], header: usize, offset: usize, length: usize) -> Result<&[u8]> {
    let begin = header + number(section, offset)?;
    let length = number(section, length)?;
    section.get(begin..begin + length).context("the section is shorter than its header says")
}

fn number(data: &[u8], at: usize) -> Result<usize> {
    let bytes = data.get(at..at + 4).with_context(|| format!("it ends before byte {}", at + 4))?;
    Ok(u32::from_le_bytes(bytes.try_into()?) as usize)
}

fn set(data: &mut [u8], at: usize, value: usize) -> Result<()> {
    let bytes = data.get_mut(at..at + 4).with_context(|| format!("it ends before byte {}", at + 4))?;
    bytes.copy_from_slice(&u32::try_from(value)?.to_le_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    const MAGIC: u32 = 0x0001_eb9f;

    /// An integer `int`, and a struct `pair` of two of them; between their names the path of a
    /// file.
    fn btf() -> Vec<u8> {
        let strings = b"\0int\0/home/me/a.rs\0pair\0x\0y\0xdp\x000:0\0";
        let types = words(&[
            1,
            1 << 24,
            4,
            32, //
            19,
            (4 << 24) | 2,
            8,
            24,
            1,
            0,
            26,
            1,
            32,
        ]);
        let header = words(&[MAGIC, 24, 0, types.len() as u32, types.len() as u32, strings.len() as u32]);
        [header, types, strings.to_vec()].concat()
    }

    /// One function, one line in the file, one relocation, all in section `xdp`.
    fn ext() -> Vec<u8> {
        let functions = [8, 28, 1, 0, 1];
        let lines = [16, 28, 1, 0, 5, 5, 0];
        let relocations = [16, 28, 1, 8, 2, 32, 0];
        let header = [MAGIC, 32, 0, 20, 20, 28, 48, 28];
        words(&[&header[..], &functions, &lines, &relocations].concat())
    }

    #[test]
    fn what_only_lines_name_is_removed_and_all_else_is_named_as_before() {
        let (btf, ext) = without_lines(&btf(), &ext()).unwrap();
        let strings = b"\0int\0pair\0x\0y\0xdp\x000:0\0";
        assert_eq!(&btf[btf.len() - strings.len()..], strings);
        let types = words(&[1, 1 << 24, 4, 32, 5, (4 << 24) | 2, 8, 10, 1, 0, 12, 1, 32]);
        assert_eq!(&btf[24..24 + types.len()], types);
        let header = words(&[MAGIC, 24, 0, types.len() as u32, types.len() as u32, strings.len() as u32]);
        assert_eq!(&btf[..24], header);
        let expected = [&[MAGIC, 32, 0, 20, 20, 0, 20, 28][..], &[8, 14, 1, 0, 1], &[16, 14, 1, 8, 2, 18, 0]];
        assert_eq!(ext, words(&expected.concat()));
    }

    #[test]
    fn a_section_that_is_cut_off_is_an_error_wherever_it_is_cut() {
        let (btf, ext) = (btf(), ext());
        for length in 0..btf.len() {
            assert!(without_lines(&btf[..length], &ext).is_err(), "{length} bytes of .BTF");
        }
        for length in 0..ext.len() {
            assert!(without_lines(&btf, &ext[..length]).is_err(), "{length} bytes of .BTF.ext");
        }
    }

    #[test]
    fn an_unknown_kind_of_type_is_an_error() {
        let mut btf = btf();
        btf[24 + 7] = 30;
        let error = without_lines(&btf, &ext()).unwrap_err();
        assert!(format!("{error:#}").contains("unknown kind of type 30 at 0"), "{error:#}");
    }
}
