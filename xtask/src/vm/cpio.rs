//! An archive that the kernel unpacks as its first file system (`newc`, Documentation/driver-api/early-userspace).

use std::{
    fs,
    io::{self, Write},
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::Path,
};

const FOLDER: u32 = 0o040_755;
const LINK: u32 = 0o120_777;
const FILE: u32 = 0o100_000;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// Writes an archive; [`Archive::finish`] completes it.
pub(super) struct Archive<W> {
    out: W,
    /// Inode numbers only have to differ.
    inodes: u32,
    written: usize,
}

impl<W: Write> Archive<W> {
    pub(super) const fn new(out: W) -> Self {
        Self { out, inodes: 0, written: 0 }
    }

    /// What is in `folder`, as it is there; everything belongs to root.
    pub(super) fn tree(&mut self, folder: &Path, at: &str) -> io::Result<()> {
        let mut found = fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>()?;
        found.sort_by_key(fs::DirEntry::file_name);
        for found in found {
            let path = found.path();
            let name = format!("{at}{}", found.file_name().to_string_lossy());
            let kind = found.file_type()?;
            if kind.is_dir() {
                self.folder(&name)?;
                self.tree(&path, &format!("{name}/"))?;
            } else if kind.is_symlink() {
                self.add(&name, LINK, (0, 0), fs::read_link(&path)?.as_os_str().as_bytes())?;
            } else if kind.is_file() {
                self.file(&name, &path)?;
            }
        }
        Ok(())
    }

    pub(super) fn folder(&mut self, name: &str) -> io::Result<()> {
        self.add(name, FOLDER, (0, 0), &[])
    }

    /// A copy of a file, with its permissions.
    pub(super) fn file(&mut self, name: &str, file: &Path) -> io::Result<()> {
        let mode = fs::metadata(file)?.mode() & 0o777;
        self.add(name, FILE | mode, (0, 0), &fs::read(file)?)
    }

    pub(super) fn script(&mut self, name: &str, text: &str) -> io::Result<()> {
        self.add(name, FILE | 0o755, (0, 0), text.as_bytes())
    }

    /// A character device by its major and minor number.
    pub(super) fn device(&mut self, name: &str, number: (u32, u32)) -> io::Result<()> {
        self.add(name, CHARACTER_DEVICE, number, &[])
    }

    pub(super) fn finish(mut self) -> io::Result<W> {
        self.add("TRAILER!!!", 0, (0, 0), &[])?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn add(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) -> io::Result<()> {
        let number = |size: usize| u32::try_from(size).map_err(io::Error::other);
        self.inodes += 1;
        let (owner, group, links, modified, check) = (0, 0, 1, 0, 0);
        let fields = [
            self.inodes,
            mode,
            owner,
            group,
            links,
            modified,
            number(content.len())?,
            0,
            0,
            device.0,
            device.1,
            number(name.len() + 1)?,
            check,
        ];
        let header: String = fields.iter().map(|field| format!("{field:08x}")).collect();
        self.write(format!("070701{header}{name}\0").as_bytes())?;
        self.pad()?;
        self.write(content)?;
        self.pad()
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len();
        self.out.write_all(bytes)
    }

    /// Headers and contents begin at multiples of 4.
    fn pad(&mut self) -> io::Result<()> {
        let missing = self.written.next_multiple_of(4) - self.written;
        self.write(&[0; 3][..missing])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_contents_are_padded_and_a_trailer_ends_it() {
        let mut archive = Archive::new(Vec::new());
        archive.script("init", "#!/x\n").unwrap();
        archive.device("dev/console", (5, 1)).unwrap();
        let bytes = archive.finish().unwrap();
        assert!(bytes.starts_with(b"07070100000001000081ed"));
        // 110 bytes of header, the name and its end: 115, so the content begins at 116 and is 5 long.
        assert_eq!(&bytes[116..121], b"#!/x\n");
        assert_eq!(&bytes[124..130], b"070701");
        let text = String::from_utf8_lossy(&bytes).into_owned();
        assert!(text.contains("0000000500000001"), "the device's number is there");
        assert!(text.ends_with("TRAILER!!!\0\0\0\0") && bytes.len() % 4 == 0);
    }
}
