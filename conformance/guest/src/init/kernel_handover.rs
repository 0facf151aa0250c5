//! I/O page tables of the kernel go over to the next one, in which a device does DMA through them where they lie
//! (`linux/patches/kexec.c`).
//!
//! ```text
//! first kernel                                second kernel
//! maps two memory files for a device, by VFIO
//! preserves the tables; and the files, and an
//! image of the tables             ── kexec ──▶ retrieves the files
//!                                              refuses descriptions that are damaged, cut off, or foreign
//!                                              adopts the tables: their image is the same, byte for byte
//!                                              the device copies; maps, unmaps; frees all
//! ```
//!
//! The device does nothing meanwhile: the kernel that goes takes away its bus mastering. With `linux/patches/kexec-dma.c` behind
//! VT-d it goes on: a transfer that begins in the first kernel ends at its place, and transfers run before and while the second
//! kernel adopts the tables.

use std::{
    convert::Infallible,
    fs,
    io::{self, Read as _, Seek as _, Write as _},
    ops::ControlFlow,
    path::Path,
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use guest::{
    machines::{EDU, Machine, Unit},
    start,
};
use hostmem::{Backing, LiveUpdate, Mapping, Pin, Pinner};
use iopt::Prot;
use runs::{Pa, Span};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::{
    dma::{self, IOVA},
    edu::BUFFER,
    host_edu::HostEdu,
    kernel_tables,
    live_update::{self, SESSION},
    pci::Device,
    space::Type1,
};

/// Numbers of the files: two of memory, in small pages and in huge ones, and the image.
const MEMORY: [u64; 2] = [1, 2];
const IMAGE: u64 = 3;
const SIZE: u64 = 8 << 20;
/// Where the device writes what it has read at the beginning, while kernels change.
const MEANWHILE: u64 = SIZE - 2 * BUFFER;
/// Copies that the device makes while the tables are adopted, a fifth of a second each.
const TRANSFERS: u64 = 10;
/// Where the second kernel maps the beginning of the first memory once more.
const AGAIN: u64 = IOVA + 4 * SIZE;

const DIRECTORY: &str = "/sys/kernel/debug/iommu/handover";

/// The test, of which each kernel has a half.
pub(crate) fn to_the_next_kernel(machine: &Machine) -> anyhow::Result<()> {
    if !start::patched("kexec")? {
        ensure!(!Path::new(DIRECTORY).exists(), "{DIRECTORY} is there");
        return Ok(());
    }
    let words = fs::read_to_string("/proc/cmdline")?;
    if live_update::goes_on(&words) {
        second(machine)
    } else {
        first(machine, &words).map(|never| match never {})
    }
}

fn command(text: &str) -> io::Result<()> {
    fs::write(Path::new(DIRECTORY).join("command"), text)
}

fn device_command(verb: &str) -> io::Result<()> {
    command(&format!("{verb} {EDU}"))
}

/// The command ends with this error number, and no other.
fn refused(done: io::Result<()>, errno: i32) -> anyhow::Result<()> {
    let found = done.err().and_then(|error| error.raw_os_error());
    ensure!(found == Some(errno), "error {errno} is due, not {found:?}");
    Ok(())
}

fn image() -> anyhow::Result<Vec<u8>> {
    let path = Path::new("/sys/kernel/debug/iommu/tables").join(EDU);
    fs::read(&path).with_context(|| path.display().to_string())
}

/// Word of a memory when the first kernel ends: no two are the same.
const fn word(memory: usize, nth: u64) -> u64 {
    ((nth << 8) | (memory as u64 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// True if the device does DMA while kernels change.
fn goes_on_meanwhile(machine: &Machine) -> anyhow::Result<bool> {
    let patched = start::patched("kexec-dma")?;
    if patched && machine.unit == Unit::Amd {
        refused(
            fs::write(Path::new(DIRECTORY).join("keep"), EDU),
            libc::EOPNOTSUPP,
        )?;
        return Ok(false);
    }
    Ok(patched)
}

fn first(machine: &Machine, words: &str) -> anyhow::Result<Infallible> {
    let shmem = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let make = |memory: usize, huge: &str| {
        fs::write(shmem, huge).context(shmem)?;
        let mapping = Mapping::new(Backing::Memfd, SIZE, None)?;
        mapping.populate(&mut |_| ControlFlow::Continue(()))?;
        for (cell, nth) in mapping.cells().iter().zip(0..) {
            cell.store(word(memory, nth), Ordering::Relaxed);
        }
        anyhow::Ok(Arc::new(mapping))
    };
    let mappings = [make(0, "never")?, make(1, "always")?];
    let (mut space, edu) = dma::open::<Type1>()?;
    for (nth, mapping) in (0..).zip(&mappings) {
        space.map_host(IOVA + nth * SIZE, mapping, Prot::RW)?;
    }
    edu.read(IOVA, BUFFER)?;

    device_command("preserve")?;
    refused(device_command("preserve"), libc::EBUSY)?;
    command("forget")?;
    refused(command("forget"), libc::ENOENT)?;
    refused(device_command("adopt"), libc::ENOENT)?;
    device_command("preserve")?;

    let session = LiveUpdate::create(SESSION)?;
    for (number, mapping) in MEMORY.into_iter().zip(&mappings) {
        session.preserve(number, mapping.fd().context("no file")?)?;
    }
    let mut file = fs::File::from(memfd_create("image", MemfdFlags::empty())?);
    file.write_all(&image()?)?;
    session.preserve(IMAGE, &file)?;
    if !goes_on_meanwhile(machine)? {
        return live_update::next_kernel(words, || Ok(()));
    }
    fs::write(Path::new(DIRECTORY).join("keep"), EDU)?;
    live_update::next_kernel(words, || edu.begin_write(IOVA + MEANWHILE, BUFFER))
}

fn second(machine: &Machine) -> anyhow::Result<()> {
    let goes_on = start::patched("kexec-dma")? && machine.unit != Unit::Amd;
    let master = HostEdu::is_master(Device(EDU))?;
    ensure!(master == goes_on, "the device may do DMA: {master}");
    let session = LiveUpdate::retrieve(SESSION)?;
    let mapping = |number| anyhow::Ok(Arc::new(Mapping::of_file(session.take(number)?)?));
    let mappings = [mapping(MEMORY[0])?, mapping(MEMORY[1])?];
    let (mut file, mut before) = (fs::File::from(session.take(IMAGE)?), Vec::new());
    file.rewind()?;
    file.read_to_end(&mut before)?;
    session.finish()?;
    let (pins, piece) = pinned(&mappings)?;

    wrong_ones_are_refused(&before)?;
    let pages = kernel_tables::pages()?;
    let edu = HostEdu::open(Device(EDU))?;
    if goes_on {
        adopted_meanwhile(&edu, &mappings)?;
    } else {
        device_command("adopt")?;
    }
    refused(device_command("adopt"), libc::EBUSY)?;
    ensure!(
        kernel_tables::pages()? > pages,
        "no page of a table is counted"
    );
    let now = image()?;
    let same = before
        .iter()
        .zip(&now)
        .take_while(|(one, other)| one == other);
    ensure!(
        before == now,
        "tables differ from byte {:#x} on",
        same.count()
    );

    the_device_copies(&edu, &mappings)?;
    let len = piece.len;
    let again = format!("{AGAIN:x} {:x} {len:x}", piece.start);
    command(&format!("map {again}"))?;
    edu.read_from(AGAIN, BUFFER)?;
    edu.write_to(IOVA + SIZE / 2, BUFFER)?;
    let [from, to] = [0, SIZE / 2].map(|at| words_at(&mappings[0], at));
    ensure!(from == to, "what is mapped again is not read");
    command(&format!("unmap {AGAIN:x} {len:x}"))?;
    command(&format!("unmap {IOVA:x} {SIZE:x}"))?;
    for gone in [AGAIN, IOVA + 2 * BUFFER] {
        let at = (gone - IOVA) % SIZE;
        let kept = words_at(&mappings[0], at);
        edu.read_from(IOVA + SIZE, BUFFER)?;
        edu.write_to(gone, BUFFER)?;
        ensure!(
            kept == words_at(&mappings[0], at),
            "the device reaches what is unmapped"
        );
    }
    command("release")?;
    refused(command("release"), libc::ENOENT)?;
    let left = kernel_tables::pages()?;
    ensure!(left == pages, "{left} pages of tables, not {pages}");
    drop(pins);
    Ok(())
}

/// A transfer of the kernel before has ended well; the device copies on, also while its tables get their new domain. Leaves the
/// memories as they were in the beginning.
fn adopted_meanwhile(edu: &HostEdu, mappings: &[Arc<Mapping>; 2]) -> anyhow::Result<()> {
    edu.end()?;
    let [first, second] = mappings;
    let right = |at: u64, from: Vec<u64>| {
        let found = words_at(first, at);
        ensure!(
            found == from,
            "{:#x} and not {:#x} at {at:#x}",
            found[0],
            from[0]
        );
        Ok(())
    };
    right(MEANWHILE, words_at(first, 0)).context("a transfer between kernels")?;
    let places: Vec<u64> = (1..=TRANSFERS)
        .map(|nth| MEANWHILE - nth * BUFFER)
        .collect();
    let was: Vec<Vec<u64>> = places.iter().map(|at| words_at(first, *at)).collect();
    thread::scope(|scope| {
        let adopting = scope.spawn(|| {
            thread::sleep(Duration::from_millis(500));
            device_command("adopt")
        });
        for (at, nth) in places.iter().zip(0..) {
            edu.read_from(IOVA + SIZE + nth * BUFFER, BUFFER)?;
            edu.write_to(IOVA + at, BUFFER)?;
        }
        let adopted = adopting.join().ok().context("a panic")?;
        Ok::<_, anyhow::Error>(adopted?)
    })?;
    for (nth, at) in (0..).zip(&places) {
        right(*at, words_at(second, nth * BUFFER))
            .context("a transfer while tables are adopted")?;
    }
    let all = places.iter().zip(&was);
    for (at, was) in all.map(|(at, was)| (*at, &**was)) {
        put(first, at, was);
    }
    let meanwhile: Vec<u64> = (MEANWHILE / 8..)
        .take(BUFFER as usize / 8)
        .map(|nth| word(0, nth))
        .collect();
    put(first, MEANWHILE, &meanwhile);
    Ok(())
}

fn put(mapping: &Mapping, at: u64, words: &[u64]) {
    let cells = mapping.cells().iter().skip((at / 8) as usize);
    for (cell, word) in cells.zip(words) {
        cell.store(*word, Ordering::Relaxed);
    }
}

/// Pins the memories, so that they stay where they are; the first piece of the first one.
fn pinned(mappings: &[Arc<Mapping>]) -> anyhow::Result<(Vec<Pin>, Span<Pa>)> {
    let pinner = Pinner::of_process()?;
    let pin = |mapping: &Arc<Mapping>| {
        let whole = Span::new(0, mapping.len());
        pinner.pin(mapping, whole, &mut |_| ControlFlow::Continue(()))
    };
    let pins = mappings.iter().map(pin).collect::<Result<Vec<_>, _>>()?;
    let first = pins.first().context("no memory")?;
    let frames = live_update::frames(first, Span::new(0, SIZE))?;
    Ok((pins, *frames.first().context("no frames")?))
}

/// Offsets in a description, `struct handover` of the patch.
const VERSION: usize = 8;
const DIGEST: usize = 12;
const FORMAT: usize = 16;
const FEATURES: usize = 32;
const LEVELS: usize = 36;
const CONTENTS: usize = 40;
const COUNT: usize = 44;
const FIRST: usize = 48;

/// Descriptions that are not what the kernel before has left are refused, each by the name of what is wrong, and nothing changes.
fn wrong_ones_are_refused(image: &[u8]) -> anyhow::Result<()> {
    let path = Path::new(DIRECTORY).join("description");
    let right = fs::read(&path)?;
    ensure!(
        right.len() > FIRST + 8 && right.starts_with(b"IOPTKHO\n"),
        "{} bytes are no description",
        right.len()
    );
    let changed = |at: usize, bytes: &[u8]| {
        let mut wrong = right.clone();
        for (old, new) in wrong.iter_mut().skip(at).zip(bytes) {
            *old = *new;
        }
        wrong
    };
    let signed = |mut wrong: Vec<u8>| {
        let digest = crc32c(&wrong[FORMAT..]).to_le_bytes();
        wrong[DIGEST..FORMAT].copy_from_slice(&digest);
        wrong
    };
    ensure!(signed(right.clone()) == right, "another digest");
    let count = (right.len() - FIRST) / 8;
    let described = |count: usize| {
        let mut all = right[..FIRST + 8 * count].to_vec();
        all[CONTENTS..COUNT].copy_from_slice(&contents(image, count).to_le_bytes());
        all[COUNT..FIRST].copy_from_slice(&(count as u32).to_le_bytes());
        signed(all)
    };
    ensure!(described(count) == right, "another digest of the tables");
    let flipped = |at: usize| [right[at] ^ 1];
    let beyond_memory = ((1u64 << 45) | 1).to_le_bytes();
    for (what, wrong, errno) in [
        ("no header", right[..FIRST - 1].to_vec(), libc::ENODATA),
        ("cut off", right[..right.len() - 8].to_vec(), libc::ENODATA),
        (
            "another mark",
            changed(0, b"IOPTIMG\n"),
            libc::EPROTONOSUPPORT,
        ),
        (
            "another version",
            changed(VERSION, &[2]),
            libc::EPROTONOSUPPORT,
        ),
        (
            "damaged",
            changed(FIRST + 9, &flipped(FIRST + 9)),
            libc::EBADMSG,
        ),
        (
            "another format",
            signed(changed(FORMAT, b"armv8")),
            libc::EXDEV,
        ),
        (
            "other features",
            signed(changed(FEATURES, &flipped(FEATURES))),
            libc::EXDEV,
        ),
        ("ten levels", signed(changed(LEVELS, &[10])), libc::EXDEV),
        (
            "no memory",
            signed(changed(FIRST, &beyond_memory)),
            libc::EFAULT,
        ),
        (
            "other tables",
            signed(changed(CONTENTS, &flipped(CONTENTS))),
            libc::ESTALE,
        ),
        (
            "a link to another table",
            described(count - 1),
            libc::ESTALE,
        ),
    ] {
        fs::write(&path, wrong)?;
        refused(device_command("adopt"), errno).context(what)?;
    }
    Ok(())
}

/// CRC-32C of so many tables of an image, the topmost first, which has one header in front of all and one in front of each other.
fn contents(image: &[u8], count: usize) -> u32 {
    let entries = |nth: usize| image.get(80 + nth * (16 + 4096)..).unwrap_or_default();
    let all: Vec<u8> = (0..count)
        .flat_map(|nth| entries(nth).iter().take(4096))
        .copied()
        .collect();
    crc32c(&all)
}

/// CRC-32C. Source: RFC 3720, section 12.1, "Header digest".
fn crc32c(bytes: &[u8]) -> u32 {
    let crc = bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg())
        })
    });
    !crc
}

fn words_at(mapping: &Mapping, at: u64) -> Vec<u64> {
    let cells = &mapping.cells()[(at / 8) as usize..][..(BUFFER / 8) as usize];
    cells
        .iter()
        .map(|cell| cell.load(Ordering::Relaxed))
        .collect()
}

/// The device copies from one memory to the other and back; each word of both is compared.
fn the_device_copies(edu: &HostEdu, mappings: &[Arc<Mapping>; 2]) -> anyhow::Result<()> {
    // From which memory and where, to where in the other one; no two overlap.
    let copies = [
        (0, 0, SIZE - BUFFER),
        (0, SIZE - BUFFER, 0x10_0800),
        (0, SIZE / 2 - BUFFER / 2, 0x2000),
        (1, 0, 0),
        (1, 0x20_0000 - BUFFER / 2, SIZE - 3 * BUFFER),
    ];
    for (memory, from, to) in copies {
        edu.read_from(IOVA + memory * SIZE + from, BUFFER)?;
        edu.write_to(IOVA + (1 - memory) * SIZE + to, BUFFER)?;
    }
    for (memory, mapping) in (0..).zip(mappings) {
        for (cell, nth) in mapping.cells().iter().zip(0..) {
            let mut expected = word(memory, nth);
            for (from_memory, from, to) in copies {
                if memory as u64 != from_memory && (to..to + BUFFER).contains(&(nth * 8)) {
                    expected = word(1 - memory, nth - to / 8 + from / 8);
                }
            }
            let found = cell.load(Ordering::Relaxed);
            ensure!(
                found == expected,
                "word {nth:#x} of memory {memory} is {found:#x}, not {expected:#x}"
            );
        }
    }
    Ok(())
}
