//! A machine's `/sys`, `/dev/kmsg` and command line with any bytes in their files.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use dmaspace::devices::{DevicesReport, Places};
use dmaspace::topology::Topology;
use dmaspace_cli::inside::explain_machine;
use tempfile::TempDir;

use super::within;

/// The files, in the order of the pieces of the input, which zero bytes divide.
const FILES: [&str; 25] = [
    "sys/devices/system/node/node0/meminfo",
    "sys/devices/system/node/node0/cpulist",
    "sys/devices/system/node/node0/distance",
    "sys/devices/system/node/node1/distance",
    "sys/bus/pci/devices/0000:00:05.0/class",
    "sys/bus/pci/devices/0000:00:05.0/vendor",
    "sys/bus/pci/devices/0000:00:05.0/device",
    "sys/bus/pci/devices/0000:00:05.0/numa_node",
    "sys/bus/pci/devices/0000:00:05.0/current_link_speed",
    "sys/bus/pci/devices/0000:00:05.0/current_link_width",
    "sys/class/iommu/dmar0/intel-iommu/address",
    "sys/class/iommu/dmar0/intel-iommu/cap",
    "sys/class/iommu/dmar0/intel-iommu/ecap",
    "sys/kernel/iommu_groups/7/type",
    "sys/kernel/iommu_groups/7/name",
    "sys/bus/event_source/devices/dmar0/events/clocks",
    "sys/module/vfio_iommu_type1/parameters/disable_hugepages",
    "sys/kernel/mm/transparent_hugepage/enabled",
    "sys/kernel/iommu_groups/7/reserved_regions",
    "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages",
    "proc/iomem",
    "proc/cmdline",
    "dev/kmsg",
    "sys/firmware/acpi/tables/DMAR",
    // The last one takes what is left, zero bytes too.
    "sys/bus/pci/devices/0000:00:05.0/config",
];

thread_local! {
    static ROOT: TempDir = laid_out();
}

fn laid_out() -> TempDir {
    let root = tempfile::tempdir_in("/dev/shm").expect("there is shared memory");
    let at = |path: &str| root.path().join(path);
    for file in FILES {
        let path = at(file);
        let directory = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(directory).expect("there is room");
    }
    for (link, target) in [
        (
            "sys/bus/pci/devices/0000:00:05.0/iommu_group",
            "/sys/kernel/iommu_groups/7",
        ),
        (
            "sys/bus/pci/devices/0000:00:05.0/iommu",
            "/sys/class/iommu/dmar0",
        ),
        (
            "sys/kernel/iommu_groups/7/devices/0000:00:05.0",
            "/sys/bus/pci/devices/0000:00:05.0",
        ),
    ] {
        let link = at(link);
        let directory: PathBuf = link.parent().unwrap_or(Path::new("/")).into();
        fs::create_dir_all(directory).expect("there is room");
        symlink(target, link).expect("there is room");
    }
    root
}

pub fn files(data: &[u8]) {
    ROOT.with(|root| {
        let root = root.path();
        let pieces = data.splitn(FILES.len(), |byte| *byte == 0);
        for (file, piece) in FILES.iter().zip(pieces.chain(std::iter::repeat(&[][..]))) {
            fs::write(root.join(file), piece).expect("there is room");
        }
        let places = Places {
            sys: root.join("sys"),
            dev: root.join("dev"),
        };
        // Each file is read as a whole, the log in pieces of 8 KiB; one of the firmware's tables up to 1 MiB.
        within((4 << 20) + 64 * data.len() as u64, || {
            let devices = DevicesReport::read(&places).expect("directories can be read");
            assert!(devices.devices.len() <= 1);
            let _ = Topology::read(&places);
            let machine = explain_machine(&places, &root.join("proc"));
            let (text, json) = machine.expect("directories can be read");
            assert!(json.contains("\"findings\""), "{json}");
            assert!(
                text.chars().all(|c| c == '\n' || !c.is_control()),
                "{text:?}"
            );
        });
    });
}
