//! The initramfs: a cpio archive in the "new ASCII" format.
//!
//! Source: Linux, Documentation/driver-api/early-userspace/buffer-format.rst. A header of 110
//! characters, the magic and thirteen fields of eight hexadecimal digits; the name with its NUL,
//! and the data, each padded to four bytes; at the end an entry named `TRAILER!!!`.

/// What an entry is: the file type of its mode, with its permissions.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Directory,
    Program,
    /// A character device with its major and minor number.
    Character(u32, u32),
    /// The end of the archive.
    Trailer,
}

impl Kind {
    const fn mode(self) -> u32 {
        match self {
            Self::Directory => 0o040_755,
            Self::Program => 0o100_755,
            Self::Character(..) => 0o020_600,
            Self::Trailer => 0,
        }
    }
}

/// An archive in the making.
#[derive(Debug, Default)]
pub struct Initramfs {
    bytes: Vec<u8>,
    entries: u32,
}

impl Initramfs {
    /// With what the kernel and a program need before anything is mounted: the directories, and the
    /// console.
    pub fn new() -> Self {
        let mut archive = Self::default();
        for directory in ["bin", "dev", "proc", "sys", "tmp"] {
            archive.entry(directory, Kind::Directory, &[]);
        }
        archive.entry("dev/console", Kind::Character(5, 1), &[]);
        archive.entry("dev/null", Kind::Character(1, 3), &[]);
        archive
    }

    /// Adds a program under `path`, which begins below the root and whose directory is there.
    pub fn program(&mut self, path: &str, data: &[u8]) {
        self.entry(path, Kind::Program, data);
    }

    /// The archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", Kind::Trailer, &[]);
        self.bytes
    }

    /// The data are shorter than 4 GiB, all that the format has place for: they were read from
    /// programs.
    fn entry(&mut self, name: &str, kind: Kind, data: &[u8]) {
        let (major, minor) = match kind {
            Kind::Character(major, minor) => (major, minor),
            _ => (0, 0),
        };
        self.entries += 1;
        let fields = [
            self.entries, // inode
            kind.mode(),
            0, // user
            0, // group
            1, // links
            0, // time
            data.len() as u32,
            0, // major and minor of the file system
            0,
            major,
            minor,
            name.len() as u32 + 1,
            0, // checksum, of another format
        ];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(data);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Entry {
        name: String,
        mode: u32,
        device: (u32, u32),
        data: Vec<u8>,
    }

    /// What an archive holds, read by the format's description.
    fn read(archive: &[u8]) -> Vec<Entry> {
        let mut entries = Vec::new();
        let mut at = 0;
        while at < archive.len() {
            let header = std::str::from_utf8(&archive[at..at + 110]).unwrap();
            assert_eq!(&header[..6], "070701");
            let field =
                |nth: usize| u32::from_str_radix(&header[6 + 8 * nth..14 + 8 * nth], 16).unwrap();
            let (size, name_size) = (field(6) as usize, field(11) as usize);
            let name = at + 110;
            let data = (name + name_size).next_multiple_of(4);
            assert_eq!(archive[name + name_size - 1], 0);
            entries.push(Entry {
                name: String::from_utf8(archive[name..name + name_size - 1].to_vec()).unwrap(),
                mode: field(1),
                device: (field(9), field(10)),
                data: archive[data..data + size].to_vec(),
            });
            at = (data + size).next_multiple_of(4);
        }
        assert_eq!(at, archive.len());
        entries
    }

    #[test]
    fn what_was_put_in_is_read_back_in_order() {
        let mut archive = Initramfs::new();
        for len in 0..9 {
            archive.program(&format!("bin/{len}"), &vec![b'x'; len]);
        }
        let entries = read(&archive.finish());
        let find = |name: &str| entries.iter().find(|entry| entry.name == name).unwrap();
        assert_eq!(find("bin").mode, 0o040_755);
        let console = find("dev/console");
        assert_eq!((console.mode, console.device), (0o020_600, (5, 1)));
        for len in 0..9 {
            let entry = &entries[entries.len() - 10 + len];
            assert_eq!(
                (&*entry.name, entry.mode),
                (&*format!("bin/{len}"), 0o100_755)
            );
            assert_eq!(entry.data, vec![b'x'; len]);
        }
        assert_eq!(entries.last().unwrap().name, "TRAILER!!!");
    }
}
