//! A virtual machine that runs, recognized by what its monitor maps: the program, or KVM's processors.
//!
//! Guest RAM is large, writable and not executable. Firmware, video memory, heaps and arenas of the C library
//! are smaller; the buffer of QEMU's translator is executable.

use std::fs;

use hostmem::read_at_most;

use super::{Guest, Interface, Monitor, Ram, qemu_rough};
use crate::inspect::process::{Area, AreaKind, MOST_TEXT};

/// Smaller areas are guest RAM only if a command line gives their size: video memory has 16 MiB, an arena of the
/// C library up to 64 MiB.
const SMALLEST: u64 = 96 << 20;

/// The virtual machine that the process runs; `None` when it runs none. Marks the areas that are guest RAM.
pub(crate) fn of_process(pid: u32, areas: &mut [Area], default_pool: u64) -> Option<Guest> {
    let line = read_at_most(format!("/proc/{pid}/cmdline"), MOST_TEXT).unwrap_or_default();
    let arguments = line.split(|byte| *byte == 0);
    let arguments: Vec<_> = arguments
        .map(|text| String::from_utf8_lossy(text).into_owned())
        .collect();
    let mut guest = of_areas(areas, &arguments, default_pool)?;
    let mut type1 = false;
    // QEMU's command line lacks devices that were plugged in later.
    let open = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten();
    for link in open.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok()) {
        match link.to_str().unwrap_or_default() {
            "/dev/iommu" => guest.interface = Some(Interface::Iommufd),
            "/dev/vfio/vfio" => type1 = true,
            _ => {}
        }
    }
    if type1 {
        guest.interface = Some(Interface::Type1);
    }
    Some(guest)
}

/// The same by areas and arguments alone.
pub fn of_areas(areas: &mut [Area], arguments: &[String], default_pool: u64) -> Option<Guest> {
    let monitor = monitor(areas)?;
    let mut guest = Guest {
        monitor,
        ..Guest::default()
    };
    if monitor == Monitor::Qemu {
        guest = qemu_rough(arguments, default_pool);
    }
    let sizes = std::mem::take(&mut guest.memory);
    mark(areas, &sizes);
    let mut end = None;
    for area in areas.iter().filter(|area| area.guest_ram) {
        let pool = (area.kind == AreaKind::Hugetlb).then_some(area.page_bytes);
        let path = area.name.starts_with('/').then(|| area.name.clone());
        let asks = match (area.asks_for_huge, area.refuses_huge) {
            (_, true) => Some(false),
            (asks, false) => asks.then_some(true),
        };
        let ram = Ram {
            bytes: area.bytes,
            pool_bytes: pool,
            shared: area.shared,
            file: path.filter(|path| !path.starts_with("/memfd:") && pool.is_none()),
            asks_for_huge: asks,
            ..Ram::default()
        };
        // One object may be several areas.
        match guest.memory.last_mut() {
            Some(last) if end == Some(area.address) && same(last, &ram) => last.bytes += ram.bytes,
            _ => guest.memory.push(ram),
        }
        end = area.address.checked_add(area.bytes);
    }
    if guest.memory.is_empty() {
        return None;
    }
    // Names and threads are those of the first object of the same size.
    for ram in &mut guest.memory {
        let size = |known: &&Ram| known.bytes == ram.bytes;
        if let Some(known) = sizes.iter().find(size) {
            *ram = Ram {
                bytes: ram.bytes,
                pool_bytes: ram.pool_bytes,
                shared: ram.shared,
                file: ram.file.take(),
                asks_for_huge: ram.asks_for_huge,
                ..known.clone()
            };
        }
    }
    Some(guest)
}

fn same(one: &Ram, other: &Ram) -> bool {
    (one.pool_bytes, one.shared, &one.file, one.asks_for_huge)
        == (
            other.pool_bytes,
            other.shared,
            &other.file,
            other.asks_for_huge,
        )
}

/// Marks guest RAM.
fn mark(areas: &mut [Area], sizes: &[Ram]) {
    let sized = |area: &Area| sizes.iter().any(|ram| ram.bytes == area.bytes);
    for area in areas
        .iter_mut()
        .filter(|area| area.mappable && !area.executable)
    {
        let named = area.name.starts_with('[') && !area.name.starts_with("[anon");
        let pool = area.kind == AreaKind::Hugetlb;
        area.guest_ram = !named && (pool || area.bytes >= SMALLEST || sized(area));
    }
}

/// The monitor, if it is one.
fn monitor(areas: &[Area]) -> Option<Monitor> {
    let mut programs = areas
        .iter()
        .filter(|area| area.executable && area.kind == AreaKind::File);
    let path = |area: &Area| {
        let path = area.name.strip_suffix(" (deleted)").unwrap_or(&area.name);
        Monitor::of_program(path)
    };
    let named = programs.find_map(path);
    let processor = |area: &Area| area.name.starts_with("anon_inode:kvm-vcpu");
    named.or_else(|| areas.iter().any(processor).then_some(Monitor::Other))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::areas;

    /// Areas of QEMU 10.0 with `-m 1G`: program, heap, video memory, guest RAM, and the translator's buffer.
    const QEMU: &str = "\
556d19000000-556d19100000 r-xp 00e6e000 fe:00 1019 /usr/bin/qemu-system-x86_64
56358fedf000-56359113c000 rw-p 00000000 00:00 0 [heap]
7f30f0021000-7f30f4000000 ---p 00000000 00:00 0
7f30f6c00000-7f30f7c00000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me dc ac hg mg
7f30f7e00000-7f3137e00000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me dc ac hg mg
7f3138000000-7f3177fff000 rwxp 00000000 00:00 0
VmFlags: rd wr ex mr mw me ac hg
";

    fn found(smaps: &str, line: &str) -> Option<(Guest, Vec<u64>)> {
        let mut areas = areas(smaps);
        let arguments: Vec<_> = line.split(' ').map(Into::into).collect();
        let guest = of_areas(&mut areas, &arguments, 2 << 20)?;
        let marked = areas.iter().filter(|area| area.guest_ram);
        Some((guest, marked.map(|area| area.address).collect()))
    }

    #[test]
    fn guest_ram_is_told_from_the_rest_of_qemu() {
        let line = "qemu-system-x86_64 -m 1G -device vfio-pci,host=01:00.0";
        let (guest, marked) = found(QEMU, line).unwrap();
        assert_eq!(marked, [0x7f30_f7e0_0000]);
        let ram = Ram {
            bytes: 1 << 30,
            asks_for_huge: Some(true),
            ..Ram::default()
        };
        assert_eq!(guest.memory, [ram]);
        let known = (guest.monitor, guest.devices.len(), guest.interface);
        assert_eq!(known, (Monitor::Qemu, 1, Some(Interface::Type1)));
        // A small one is found by its size only, which a damaged command line does not give.
        let small = QEMU.replace("7f3137e00000", "7f30fbe00000");
        let (guest, _) = found(&small, "qemu-system-x86_64 -m 64M").unwrap();
        assert_eq!(guest.bytes(), 64 << 20);
        assert_eq!(found(&small, "qemu-system-x86_64 -m"), None);
    }

    #[test]
    fn objects_are_found_by_their_size() {
        let memfd = "7f3e5bfff000-7f3e9bfff000 rw-s 00000000 00:01 27 /memfd:memory-backend-memfd (deleted)";
        let smaps = QEMU.replace("7f30f7e00000-7f3137e00000 rw-p 00000000 00:00 0", memfd);
        let line = "qemu-system-x86_64 -m 1G -machine memory-backend=ram \
            -object memory-backend-memfd,id=ram,size=1G,prealloc=on,prealloc-threads=2";
        let (guest, marked) = found(&smaps, &line.replace("            ", "")).unwrap();
        assert_eq!(marked, [0x7f3e_5bff_f000]);
        let ram = Ram {
            id: "ram".into(),
            bytes: 1 << 30,
            shared: true,
            asks_for_huge: Some(true),
            prealloc_threads: 2,
            threads_given: true,
            ..Ram::default()
        };
        assert_eq!(guest.memory, [ram]);
    }

    #[test]
    fn other_monitors_are_known_by_their_program_or_their_processors() {
        let memory = "7f0000000000-7f0008000000 rw-p 00000000 00:00 0\n\
            7f0008000000-7f0010000000 rw-p 00000000 00:00 0\n\
            7f0100000000-7f0100200000 rw-s 00000000 00:0f 5 /dev/hugepages/ram (deleted)\n\
            KernelPageSize:     2048 kB\nVmFlags: rd wr sh ht\n\
            7f0200000000-7f0220000000 rw-s 00000000 00:01 7 /dev/shm/ch_ram\n";
        let program = "556d19000000-556d19100000 r-xp 0 fe:00 10 /usr/bin/";
        let processor =
            "7f0300000000-7f0300003000 rw-s 0 00:0e 9 anon_inode:kvm-vcpu:0\nVmFlags: io\n";
        for (first, monitor) in [
            (
                format!("{program}cloud-hypervisor (deleted)\n"),
                Monitor::CloudHypervisor,
            ),
            (format!("{program}firecracker\n"), Monitor::Firecracker),
            (processor.into(), Monitor::Other),
        ] {
            let (guest, _) = found(&(first + memory), "").unwrap();
            assert_eq!(guest.monitor, monitor);
            let parts = guest
                .memory
                .iter()
                .map(|ram| (ram.bytes, ram.pool_bytes, ram.shared));
            let expected = [
                // Two areas without a gap are one part.
                (256 << 20, None, false),
                (2 << 20, Some(2 << 20), true),
                (512 << 20, None, true),
            ];
            assert_eq!(parts.collect::<Vec<_>>(), expected);
            assert_eq!(guest.memory[2].file.as_deref(), Some("/dev/shm/ch_ram"));
        }
        // A debugger maps the program, and does not run it.
        let read = program.replace("r-xp", "r--p") + "qemu-system-x86_64\n";
        assert_eq!(found(&(read + memory), ""), None);
    }
}
