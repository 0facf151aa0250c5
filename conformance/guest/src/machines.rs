//! The machines that are booted, and the tests that each of them runs.
//!
//! All have the same three devices below the root complex, each in a group of its own:
//! `edu`, a device made for lessons, with a DMA engine; an NVMe device with a
//! small disk; and `ivshmem-plain`, whose BAR is memory. They differ in the IOMMU, which says what they are, a q35 or
//! the `virt` of Arm or RISC-V; and one has two memory nodes, with devices below each.

pub mod provoked;

use provoked::PROVOKED;

/// The number of a PCI function within its segment, by its address: `0000:00:05.0` is 0x28.
pub fn bdf(address: &str) -> Option<u16> {
    let (_, rest) = address.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (slot, function) = rest.split_once('.')?;
    let number = |text| u16::from_str_radix(text, 16).ok();
    Some(number(bus)? << 8 | number(slot)? << 3 | number(function)?)
}

/// Where `edu` sits: QEMU, docs/specs/edu.
pub const EDU: &str = "0000:00:05.0";
/// Where the NVMe device sits.
pub const NVME: &str = "0000:00:06.0";
/// Its serial number.
pub const NVME_SERIAL: &str = "dmaspace";
/// Blocks of its disk.
pub const DISK_BLOCKS: u64 = 2048;

/// Bytes of a block of that disk, 512, when the machine starts: no two words are alike.
pub fn disk_block(block: u64) -> impl Iterator<Item = u8> {
    let words = block * 64..(block + 1) * 64;
    words.flat_map(|word| (word + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
}

/// Where the device with memory in BAR 2 sits: QEMU, docs/specs/ivshmem-spec.
pub const IVSHMEM: &str = "0000:00:07.0";

/// Bytes of the memory behind BAR 2 of [`IVSHMEM`].
pub const IVSHMEM_BYTES: u64 = 4 << 20;
/// Huge pages of 2 MiB that the guest sets aside when it boots.
pub const HUGE_PAGES: u64 = 64;

/// The IOMMU of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// VT-d, second-stage tables of four levels, in legacy mode.
    Intel,
    /// The same in scalable mode.
    IntelSecond,
    /// VT-d in scalable mode, where it walks first-stage tables only.
    IntelFirst,
    /// AMD-Vi, without interrupt remapping.
    Amd,
    /// `dmaspace`'s own virtio-iommu on the host, by vhost-user, at [`VIRTIO_IOMMU`]. QEMU knows nothing
    /// of it, so the DMA of the devices behind it is done by the host as well.
    Virtio,
    /// SMMUv3 on Arm, with tables of the first stage only.
    Smmu1,
    /// The same with those of the second.
    Smmu2,
    /// The RISC-V IOMMU.
    RiscV,
}

impl Unit {
    /// Units that are measured, with the names of the machines that have nothing else.
    pub const MEASURED: [(&'static str, Self); 4] = [
        ("intel", Self::Intel),
        ("amd", Self::Amd),
        ("smmu1", Self::Smmu1),
        ("smmu2", Self::Smmu2),
    ];

    /// The one of these of this name.
    pub fn find(name: &str) -> Option<Self> {
        let mut all = Self::MEASURED.into_iter();
        all.find_map(|(known, unit)| (known == name).then_some(unit))
    }

    /// QEMU's arguments for it. Where there are devices behind it, it comes first.
    pub const fn qemu(self) -> &'static [&'static str] {
        match self {
            Self::Intel => &["-device", "intel-iommu,intremap=on,aw-bits=48"],
            Self::IntelSecond => &[
                "-device",
                "intel-iommu,intremap=on,aw-bits=48,scalable-mode=on",
            ],
            Self::IntelFirst => &[
                "-device",
                "intel-iommu,intremap=on,aw-bits=48,scalable-mode=on,fsts=on",
            ],
            // Without `dma-remap` it passes everything by without a look at the tables.
            Self::Amd => &["-device", "amd-iommu,intremap=off,dma-remap=on"],
            // The host's side has more to say of it.
            Self::Virtio => &[],
            Self::Smmu1 => &[
                "-machine",
                "virt,iommu=smmuv3,gic-version=3",
                "-cpu",
                "max",
                "-global",
                "arm-smmuv3.stage=1",
            ],
            Self::Smmu2 => &[
                "-machine",
                "virt,iommu=smmuv3,gic-version=3",
                "-cpu",
                "max",
                "-global",
                "arm-smmuv3.stage=2",
            ],
            // Interrupts by wire: Linux 7.2 maps no messages behind it.
            Self::RiscV => &["-machine", "virt,aia=aplic,iommu-sys=on"],
        }
    }

    /// Words for the kernel's command line. VFIO wants interrupts remapped, or an option that says
    /// that they need not be.
    pub const fn kernel(self) -> &'static str {
        match self {
            Self::Intel => "intel_iommu=on",
            Self::IntelSecond | Self::IntelFirst => "intel_iommu=on,sm_on",
            Self::Smmu1 | Self::Smmu2 => "",
            Self::Amd | Self::Virtio => {
                "vfio_iommu_type1.allow_unsafe_interrupts=1 iommufd.allow_unsafe_interrupts=1"
            }
            // QEMU's device tree has the unit wait for a controller of messages that is not there.
            Self::RiscV => "fw_devlink=permissive iommufd.allow_unsafe_interrupts=1",
        }
    }

    /// Prefix of the names of its units in `/sys/class/iommu`.
    pub const fn sysfs(self) -> &'static str {
        match self {
            Self::Intel | Self::IntelSecond | Self::IntelFirst => "dmar",
            Self::Amd => "ivhd",
            // Named after the PCI function.
            Self::Virtio => VIRTIO_IOMMU,
            Self::Smmu1 | Self::Smmu2 => "smmu3",
            Self::RiscV => "riscv-iommu",
        }
    }
}

/// A machine.
#[derive(Debug)]
pub struct Machine {
    /// As the results and the kernel's command line call it.
    pub name: &'static str,
    /// Its IOMMU.
    pub unit: Unit,
    /// The machine that it is a guest for, if it has memory nodes: a topology as the library reads it.
    pub nodes: Option<&'static str>,
    /// The tests that it runs, in this order: each may count on those before it.
    tests: &'static [&'static [&'static str]],
}

/// Where virtio's IOMMU sits, in the machine that has it.
pub const VIRTIO_IOMMU: &str = "0000:00:08.0";
/// Where the balloon beside it sits.
pub const BALLOON: &str = "0000:00:09.0";
/// The addresses that virtio's IOMMU says no device may use, beside those of interrupts: first and last.
pub const RESERVED: (u64, u64) = (0x7000_0000, 0x700f_ffff);
/// Bytes of memory of all machines.
pub const MEMORY: u64 = 2 << 30;
/// All machines.
pub const MACHINES: &[Machine] = &[
    Machine {
        name: "intel",
        unit: Unit::Intel,
        nodes: None,
        tests: &[
            PLATFORM,
            OWN,
            TYPE1,
            IOMMUFD,
            WINDOWS,
            // Slow tests, mocks, faults that are planted, interrupts, and a unit whose tables are shown.
            &[
                "type1_waits_for_an_interrupt",
                "type1_unmasks_a_wired_interrupt",
                "iommufd_waits_for_an_interrupt",
                "tables_that_the_kernel_shows_are_read",
                "tables_that_the_kernel_images_are_read",
                "iommufd_changes_page_sizes_under_dma",
                "iommufd_answers_as_the_table_says",
                "iommufd_behaves_as_the_table_says",
                "mocks_tell_what_is_dirty",
                "a_blind_mock_makes_everything_dirty",
                "users_in_the_kernel_let_go",
                "queues_of_hardware_hold_on",
                "compatibility_is_as_before_when_a_step_fails",
                "iommufd_is_as_before_when_a_step_fails",
            ],
            NAMED,
        ],
    },
    Machine {
        name: "amd",
        unit: Unit::Amd,
        nodes: None,
        tests: &[&[
            "the_unit_is_there_and_has_the_devices",
            "each_device_has_a_group_of_its_own",
            "nodes_are_those_of_sysfs",
            "a_device_is_bound_to_vfio_pci",
            "check_by_vfio_of_4k_pages",
            "check_by_iommufd_of_2m_pages",
            "type1_copies_in_4k_pages",
            "type1_copies_in_transparent_huge_pages",
            "type1_copies_in_2m_pages",
            "type1_takes_what_it_unmaps",
            "type1_keeps_read_only_memory",
            "type1_reads_a_block_of_nvme",
            "type1_waits_for_an_interrupt",
            "type1_reaches_another_device",
            "type1_does_not_charge_registers_among_memory",
            "compatibility_copies_in_4k_pages",
            "compatibility_copies_in_transparent_huge_pages",
            "compatibility_copies_in_2m_pages",
            "compatibility_takes_what_it_unmaps",
            "compatibility_keeps_read_only_memory",
            "compatibility_reads_a_block_of_nvme",
            "compatibility_refuses_another_device",
            "iommufd_copies_in_4k_pages",
            "iommufd_copies_in_transparent_huge_pages",
            "iommufd_copies_in_2m_pages",
            "iommufd_takes_what_it_unmaps",
            "iommufd_changes_page_sizes_under_dma",
            "iommufd_keeps_read_only_memory",
            "iommufd_reads_a_block_of_nvme",
            "iommufd_waits_for_an_interrupt",
            "iommufd_serves_a_monitor",
            "iommufd_refuses_another_device_by_address",
            "iommufd_reaches_another_device",
            "a_bar_follows_the_command_register",
            "a_revoked_bar_stays_dead_and_is_mapped_anew",
            "type1_cuts_with_permission",
            "compatibility_cuts_with_permission",
            "iommufd_cuts_with_permission",
            "type1_finds_its_mappings_when_a_device_comes_back",
            "compatibility_finds_its_mappings_when_a_device_comes_back",
            "iommufd_finds_its_mappings_when_a_device_comes_back",
            "type1_finds_its_mappings_on_a_device_that_was_removed",
            "iommufd_finds_its_mappings_on_a_device_that_was_removed",
            "type1_goes_over_to_a_second_process",
            "iommufd_goes_over_to_a_second_process",
            "type1_releases_and_restores",
            "compatibility_releases_and_restores",
            "iommufd_releases_and_restores",
            "type1_cannot_tell_what_is_dirty",
            "compatibility_cannot_tell_what_is_dirty",
            "iommufd_cannot_tell_what_is_dirty",
            "tables_that_the_kernel_images_are_read",
            "kernel_tables_are_those_named",
        ]],
    },
    Machine {
        name: "second-stage",
        unit: Unit::IntelSecond,
        nodes: None,
        tests: &[SCALABLE],
    },
    Machine {
        name: "first-stage",
        unit: Unit::IntelFirst,
        nodes: None,
        tests: &[SCALABLE],
    },
    Machine {
        name: "viommu",
        unit: Unit::Virtio,
        nodes: None,
        tests: &[&[
            "the_unit_is_there_and_has_the_devices",
            "each_device_has_a_group_of_its_own",
            "a_device_is_bound_to_vfio_pci",
            "the_kernel_knows_what_is_reserved",
            "the_unit_reports_a_fault",
            "type1_copies_in_4k_pages",
            "type1_copies_in_transparent_huge_pages",
            "type1_copies_in_2m_pages",
            "type1_takes_what_it_unmaps",
            "type1_keeps_read_only_memory",
            "type1_maps_64_mib_at_once",
            "type1_maps_2000_areas_apart",
            "type1_has_two_devices_apart_and_together",
            "compatibility_copies_in_4k_pages",
            "compatibility_takes_what_it_unmaps",
            "iommufd_copies_in_4k_pages",
            "iommufd_copies_in_transparent_huge_pages",
            "iommufd_copies_in_2m_pages",
            "iommufd_takes_what_it_unmaps",
            "iommufd_keeps_read_only_memory",
            "iommufd_maps_64_mib_at_once",
            "iommufd_maps_2000_areas_apart",
            "iommufd_has_two_devices_apart_and_together",
            "type1_finds_its_mappings_when_a_device_comes_back",
            "iommufd_finds_its_mappings_when_a_device_comes_back",
            "type1_goes_over_to_a_second_process",
            "iommufd_goes_over_to_a_second_process",
            "type1_releases_and_restores",
            "iommufd_releases_and_restores",
            "iommufd_keeps_its_memory_while_the_rest_goes",
            "the_host_holds_nothing_of_the_guest",
        ]],
    },
    Machine {
        name: "two-nodes",
        unit: Unit::Intel,
        nodes: Some(TWO_NODES),
        tests: &[&[
            "devices_are_on_the_planned_nodes",
            "nodes_are_those_of_sysfs",
            "own_tables_lie_on_their_nodes",
            "memory_of_both_nodes_is_brought_in_there",
            "check_places_tables_on_both_nodes",
            "iommufd_has_a_table_on_each_node",
            "iommufd_lends_a_table_to_another_node",
            "type1_has_containers_on_both_nodes",
            "compatibility_has_containers_on_both_nodes",
            "type1_undoes_what_one_of_two_containers_refuses",
            "compatibility_undoes_what_one_of_two_containers_refuses",
            "check_by_vfio_has_containers_on_both_nodes",
            "type1_has_devices_of_both_nodes",
            "compatibility_has_devices_of_both_nodes",
            "iommufd_has_devices_of_both_nodes",
            "iommufd_changes_page_sizes_under_dma",
            "tables_far_from_devices_are_reported",
        ]],
    },
    Machine {
        name: LIVE_UPDATE,
        unit: Unit::Intel,
        nodes: None,
        tests: &[&["a_space_goes_over_to_the_next_kernel"]],
    },
    Machine {
        name: LIVE_UPDATE_OF_TABLES,
        unit: Unit::Intel,
        nodes: None,
        tests: &[&["kernel_tables_go_over_to_the_next_kernel"]],
    },
    Machine {
        name: LIVE_UPDATE_OF_AMD_TABLES,
        unit: Unit::Amd,
        nodes: None,
        tests: &[&["kernel_tables_go_over_to_the_next_kernel"]],
    },
    Machine {
        name: "smmu1",
        unit: Unit::Smmu1,
        nodes: None,
        tests: &[PLATFORM, OWN, TYPE1, IOMMUFD, WINDOWS, NAMED],
    },
    Machine {
        name: "smmu2",
        unit: Unit::Smmu2,
        nodes: None,
        tests: &[PLATFORM, OWN, TYPE1, IOMMUFD, WINDOWS, NAMED],
    },
    Machine {
        name: "riscv",
        unit: Unit::RiscV,
        nodes: None,
        tests: &[PLATFORM, OWN, IOMMUFD, NAMED, SIZES],
    },
];

/// Machines whose kernel is replaced by the next one.
const LIVE_UPDATE: &str = "live-update";
const LIVE_UPDATE_OF_TABLES: &str = "live-update-tables";
const LIVE_UPDATE_OF_AMD_TABLES: &str = "live-update-amd-tables";

/// Base of the other tests.
const PLATFORM: &[&str] = &[
    "the_kernel_is_linux_7_2",
    "vfio_and_iommufd_are_there",
    "the_unit_is_there_and_has_the_devices",
    "each_device_has_a_group_of_its_own",
    "a_device_is_bound_to_vfio_pci",
    "devices_says_how_to_bind_one",
    "the_unit_reports_a_fault",
];

/// The library's own tables.
const OWN: &[&str] = &[
    "check_of_4k_pages",
    "check_of_transparent_huge_pages",
    "check_of_2m_pages",
    "check_of_a_device_without_a_driver",
];

/// VFIO's containers.
const TYPE1: &[&str] = &[
    "check_by_vfio_gives_back_when_interrupted",
    "check_by_vfio_of_4k_pages",
    "check_by_vfio_of_transparent_huge_pages",
    "check_by_vfio_of_2m_pages",
    "type1_copies_in_4k_pages",
    "type1_copies_in_transparent_huge_pages",
    "type1_copies_in_2m_pages",
    "type1_takes_what_it_unmaps",
    "type1_keeps_read_only_memory",
    "type1_reads_a_block_of_nvme",
    "type1_keeps_the_limit",
    "type1_reaches_another_device",
    "type1_does_not_charge_registers_among_memory",
    "type1_serves_vfio_ioctls",
    "type1_cuts_with_permission",
    "type1_undoes_what_meets_the_limit_in_the_middle",
    "type1_charges_each_container",
    "type1_finds_its_mappings_when_a_device_comes_back",
    "type1_finds_its_mappings_on_a_device_that_was_removed",
    "type1_goes_over_to_a_second_process",
    "check_by_vfio_meets_the_limit",
    "type1_releases_and_restores",
    "type1_cannot_tell_what_is_dirty",
    "type1_merges_100000_areas",
    "type1_answers_as_the_table_says",
    "type1_behaves_as_the_table_says",
];

/// iommufd, and containers that it plays.
const IOMMUFD: &[&str] = &[
    "compatibility_copies_in_4k_pages",
    "compatibility_copies_in_transparent_huge_pages",
    "compatibility_copies_in_2m_pages",
    "compatibility_takes_what_it_unmaps",
    "compatibility_keeps_read_only_memory",
    "compatibility_reads_a_block_of_nvme",
    "compatibility_keeps_the_limit",
    "compatibility_refuses_another_device",
    "iommufd_copies_in_4k_pages",
    "iommufd_copies_in_transparent_huge_pages",
    "iommufd_copies_in_2m_pages",
    "iommufd_takes_what_it_unmaps",
    "iommufd_keeps_read_only_memory",
    "iommufd_reads_a_block_of_nvme",
    "iommufd_serves_a_monitor",
    "iommufd_keeps_the_limit",
    "iommufd_refuses_another_device_by_address",
    "iommufd_reaches_another_device",
    "a_bar_follows_the_command_register",
    "a_revoked_bar_stays_dead_and_is_mapped_anew",
    "compatibility_cuts_with_permission",
    "compatibility_undoes_what_meets_the_limit_in_the_middle",
    "iommufd_cuts_with_permission",
    "iommufd_undoes_what_meets_the_limit_in_the_middle",
    "compatibility_charges_each_container",
    "iommufd_charges_once",
    "iommufd_counts_by_process",
    "compatibility_finds_its_mappings_when_a_device_comes_back",
    "iommufd_finds_its_mappings_when_a_device_comes_back",
    "iommufd_finds_its_mappings_on_a_device_that_was_removed",
    "iommufd_goes_over_to_a_second_process",
    "check_by_iommufd_meets_the_limit",
    "check_by_iommufd_is_reported",
    "compatibility_releases_and_restores",
    "iommufd_releases_and_restores",
    "compatibility_cannot_tell_what_is_dirty",
    "iommufd_cannot_tell_what_is_dirty",
    "compatibility_is_not_handed_over",
    "iommufd_hands_over_files_only",
    "iommufd_maps_100000_areas",
    "iommufd_refuses_a_table_that_tells_what_is_dirty",
];

/// The same, with addresses that no device translates.
const WINDOWS: &[&str] = &[
    "check_by_iommufd_of_4k_pages",
    "check_by_iommufd_of_transparent_huge_pages",
    "check_by_iommufd_of_2m_pages",
    "compatibility_pins_when_a_device_is_opened",
    "compatibility_answers_as_the_table_says",
    "compatibility_behaves_as_the_table_says",
    "every_row_that_is_not_shown_is_in_the_table",
];

/// Tables that the kernel has.
const NAMED: &[&str] = &["kernel_tables_are_those_named"];

/// Leaves that change their sizes, where the kernel has our patch.
const SIZES: &[&str] = &["iommufd_changes_page_sizes_under_dma"];

/// Tests in scalable mode: devices find mapped memory where it is mapped, and nothing elsewhere.
const SCALABLE: &[&str] = &[
    "the_unit_is_there_and_has_the_devices",
    "the_unit_walks_tables_of_one_stage",
    "a_device_is_bound_to_vfio_pci",
    "the_unit_reports_a_fault",
    "type1_copies_in_4k_pages",
    "type1_copies_in_transparent_huge_pages",
    "type1_copies_in_2m_pages",
    "type1_takes_what_it_unmaps",
    "type1_keeps_read_only_memory",
    "type1_reads_a_block_of_nvme",
    "iommufd_copies_in_4k_pages",
    "iommufd_copies_in_transparent_huge_pages",
    "iommufd_copies_in_2m_pages",
    "iommufd_takes_what_it_unmaps",
    "iommufd_changes_page_sizes_under_dma",
    "iommufd_keeps_read_only_memory",
    "iommufd_reads_a_block_of_nvme",
    "tables_that_the_kernel_images_are_read",
    "kernel_tables_are_those_named",
];

/// Two devices on each of two nodes.
const TWO_NODES: &str = r#"
node = [
    { id = 0, memory_mib = 1024, cpus = 1, distances = [10, 21] },
    { id = 1, memory_mib = 1024, cpus = 1, distances = [21, 10] },
]
device = [
    { address = "0000:17:00.0", node = 0, emulated = "edu,dma_mask=0xffffffffffffffff" },
    { address = "0000:18:00.0", node = 0, emulated = "edu,dma_mask=0xffffffffffffffff" },
    { address = "0000:b1:00.0", node = 1, emulated = "edu,dma_mask=0xffffffffffffffff" },
    { address = "0000:b2:00.0", node = 1, emulated = "edu,dma_mask=0xffffffffffffffff" },
]
"#;

impl Machine {
    /// Parameters of its kernel, beside those of its unit.
    pub fn kernel(&self) -> &'static str {
        match self.name {
            LIVE_UPDATE | LIVE_UPDATE_OF_TABLES | LIVE_UPDATE_OF_AMD_TABLES => {
                "kho=on liveupdate=on retain_initrd"
            }
            name => provoked::kernel(name),
        }
    }

    /// The machine of this name.
    pub fn find(name: &str) -> Option<&'static Self> {
        let mut all = MACHINES.iter().chain(PROVOKED);
        all.find(|machine| machine.name == name)
    }

    /// Its tests whose name contains `only`, or one of its parts between commas; all of them if it is the machine's own name, or nothing.
    pub fn tests(&self, only: Option<&str>) -> impl Iterator<Item = &'static str> {
        let only = only.filter(|part| *part != self.name);
        let any = |parts: &str, name: &str| parts.split(',').any(|part| name.contains(part));
        let wanted = move |name: &str| only.is_none_or(|parts| any(parts, name));
        let all = self.tests.iter().flat_map(|some| some.iter());
        all.copied().filter(move |name| wanted(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_words_and_no_machine_has_one_twice() {
        let word = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let all: Vec<_> = MACHINES.iter().chain(PROVOKED).collect();
        for (nth, machine) in all.iter().enumerate() {
            assert!(all[..nth].iter().all(|m| m.name != machine.name));
            let tests: Vec<_> = machine.tests(None).collect();
            for (nth, name) in tests.iter().enumerate() {
                assert!(word(name), "{name}");
                assert!(!tests[..nth].contains(name), "{name}");
            }
        }
    }

    #[test]
    fn an_address_is_bus_device_and_function() {
        assert_eq!(bdf(EDU), Some(0x28));
        assert_eq!(bdf("0000:b1:1f.7"), Some(0xb1ff));
        assert_eq!(bdf("edu"), None);
    }

    #[test]
    fn only_takes_what_contains_the_word() {
        let intel = Machine::find("intel").unwrap();
        let all = intel.tests(None).count();
        let some: Vec<_> = intel.tests(Some("check_of")).collect();
        assert!(some.len() > 1 && some.iter().all(|name| name.contains("check_of")));
        assert_eq!(intel.tests(Some("no such thing")).count(), 0);
        assert_eq!(intel.tests(Some("intel")).count(), all);
    }
}
