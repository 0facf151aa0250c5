//! Tables in a file: an image, a dump of memory, a kernel's text.

use iopt::named::{FORMATS, root};
use std::fs::File;
use std::io::{Seek as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;

use dmaspace_cli::inside::{InDump, Limits, Outcome, TableFile, Tables, diff, explain, survey};

use super::{Bytes, within};

const LIMITS: Limits = Limits {
    tables: 64,
    runs: 100,
    findings: 50,
    lines: 100,
};

thread_local! {
    /// The file, written anew each time.
    static KEPT: File = tempfile::tempfile_in("/dev/shm").expect("there is shared memory");
}

/// Where a file with these bytes is.
fn keep(bytes: &[u8]) -> PathBuf {
    KEPT.with(|mut file| {
        file.set_len(0).expect("a file can be emptied");
        file.rewind().expect("a file has a beginning");
        file.write_all(bytes).expect("there is room");
        format!("/proc/self/fd/{}", file.as_raw_fd()).into()
    })
}

pub fn file(data: &[u8]) {
    let mut bytes = Bytes(data);
    // The bytes read are in memory twice, and in maps of at most 64 bytes for each 8.
    let most = (1 << 20) + 64 * data.len() as u64;
    let opened = match bytes.below(4) {
        0 => {
            let path = keep(&[b"IOPTIMG\n", bytes.0].concat());
            within(most, || TableFile::open(&path, None))
        }
        1 => {
            let path = keep(&repaired(bytes.0));
            within(most, || TableFile::open(&path, None))
        }
        2 => {
            let name = FORMATS[bytes.below(FORMATS.len())];
            let [levels, bits, encryption, flags] = bytes.take();
            let address = u64::from(bytes.u16()) << 10;
            let some = |bit: u8, value: u8| (flags >> bit & 1 == 1).then_some(value);
            let Ok(root) = root(
                name,
                address,
                some(0, levels),
                some(1, bits),
                flags & 4 != 0,
            ) else {
                return;
            };
            let place = InDump {
                root,
                offset: u64::from(flags >> 4) << 12,
                encryption_bit: some(3, encryption).map(u32::from),
            };
            let path = keep(bytes.0);
            within(most, || TableFile::open(&path, Some(place)))
        }
        _ => {
            let path = keep(&[b"Device ", bytes.0].concat());
            let device = bytes.flag().then_some("0000:00:0a.0");
            within(most, || TableFile::open_kernel_text(&path, device))
        }
    };
    let Ok(opened) = opened else {
        return;
    };
    // The limits above, and blocks of 4 KiB of a dump that are read for it.
    let most = (8 << 20) + 16 * data.len() as u64;
    within(most, || {
        if let Ok(tables) = opened.tables() {
            look(&tables);
        }
    });
}

/// Reports on tables are bounded, and a table does not differ from itself.
fn look(tables: &Tables<'_>) {
    let found = survey(tables, LIMITS);
    let counted: u64 = found.levels.iter().map(|level| level.tables).sum();
    assert!(counted <= LIMITS.tables + 1, "{counted} tables");
    assert!(found.runs.len() <= LIMITS.runs && found.tree.len() <= LIMITS.lines);
    assert!(found.findings.len() <= LIMITS.findings + 1);
    assert!(diff(&found, &found).changes.is_empty());
    let runs = found.runs.iter().take(4).map(|run| run.iova);
    for iova in runs.chain([0, 1 << 47, u64::MAX]) {
        let way = explain(tables, iova);
        assert!(way.steps.len() <= usize::from(tables.root().levels));
        let run = found
            .runs
            .iter()
            .find(|run| iova.wrapping_sub(run.iova) < run.bytes);
        if let (Some(run), Outcome::Translated { pa, .. }) = (run, way.read) {
            assert_eq!(pa.wrapping_sub(run.pa), iova - run.iova);
        }
    }
}

/// An image of these bytes whose magic, version, length and checksum are right.
fn repaired(bytes: &[u8]) -> Vec<u8> {
    let mut image = bytes.to_vec();
    image.resize(image.len().max(80), 0);
    let len = image.len() as u64 + 4;
    image[..8].copy_from_slice(b"IOPTIMG\n");
    image[8..12].copy_from_slice(&1u32.to_le_bytes());
    image[12..16].copy_from_slice(&80u32.to_le_bytes());
    image[16..24].copy_from_slice(&len.to_le_bytes());
    let sum = crc32c(&image);
    image.extend(sum.to_le_bytes());
    image
}

/// CRC-32C (RFC 3720, appendix B.4), bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| crc >> 1 ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
    !bytes
        .iter()
        .fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}
