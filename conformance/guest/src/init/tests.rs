//! The tests by name. Each is on the list of at least one machine.

use guest::machines::{EDU, Machine, NVME};
use hostmem::Backing::{Anon4K, Hugetlb2M, Thp};

use crate::{
    charges, containers, dma, domains, examples, faults, handover, interrupts, kernel_handover,
    kernel_tables, limit, live_update, many, numa, oversubscribed, page_sizes, peer, platform,
    program, provoke, release, replug, semantics,
    space::{Compatibility, Iommufd, Type1},
    tracking, virtio_iommu,
};

/// A test: an error is why it failed.
pub(crate) type Test = fn(&Machine) -> anyhow::Result<()>;

const TESTS: &[(&str, Test)] = &[
    ("the_kernel_is_linux_7_2", platform::kernel),
    ("kernel_tables_are_those_named", kernel_tables::named),
    ("vfio_and_iommufd_are_there", platform::device_files),
    ("the_unit_is_there_and_has_the_devices", platform::unit),
    ("the_unit_walks_tables_of_one_stage", platform::stage),
    ("each_device_has_a_group_of_its_own", platform::groups),
    ("a_device_is_bound_to_vfio_pci", platform::bind),
    ("devices_says_how_to_bind_one", program::devices),
    ("check_of_4k_pages", program::small_pages),
    (
        "check_of_transparent_huge_pages",
        program::transparent_huge_pages,
    ),
    ("check_of_2m_pages", program::huge_pages),
    ("check_of_a_device_without_a_driver", |_| {
        program::check_by("iommufd", "4k", NVME)
    }),
    (
        "check_by_vfio_gives_back_when_interrupted",
        program::interrupted,
    ),
    ("check_by_vfio_of_4k_pages", |_| {
        program::check_by("vfio", "4k", EDU)
    }),
    ("check_by_vfio_of_transparent_huge_pages", |_| {
        program::check_by("vfio", "thp", EDU)
    }),
    ("check_by_vfio_of_2m_pages", |_| {
        program::check_by("vfio", "hugetlb-2m", EDU)
    }),
    ("check_by_vfio_meets_the_limit", |_| {
        program::meets_the_limit("vfio")
    }),
    ("check_by_iommufd_of_4k_pages", |_| {
        program::check_by("iommufd", "4k", EDU)
    }),
    ("check_by_iommufd_of_transparent_huge_pages", |_| {
        program::check_by("iommufd", "thp", EDU)
    }),
    ("check_by_iommufd_of_2m_pages", |_| {
        program::check_by("iommufd", "hugetlb-2m", EDU)
    }),
    ("check_by_iommufd_meets_the_limit", |_| {
        program::meets_the_limit("iommufd")
    }),
    ("check_by_iommufd_is_reported", program::reported),
    ("devices_are_on_the_planned_nodes", numa::planned),
    ("nodes_are_those_of_sysfs", numa::topology),
    ("own_tables_lie_on_their_nodes", numa::own_tables),
    ("memory_of_both_nodes_is_brought_in_there", numa::populated),
    ("check_places_tables_on_both_nodes", numa::program),
    ("iommufd_has_a_table_on_each_node", numa::iommufd),
    ("iommufd_lends_a_table_to_another_node", numa::lent),
    (
        "type1_has_containers_on_both_nodes",
        containers::on_both_nodes::<false>,
    ),
    (
        "compatibility_has_containers_on_both_nodes",
        containers::on_both_nodes::<true>,
    ),
    (
        "type1_undoes_what_one_of_two_containers_refuses",
        containers::undone_in_both::<false>,
    ),
    (
        "compatibility_undoes_what_one_of_two_containers_refuses",
        containers::undone_in_both::<true>,
    ),
    (
        "check_by_vfio_has_containers_on_both_nodes",
        containers::program,
    ),
    (
        "type1_has_devices_of_both_nodes",
        domains::in_one_space::<Type1>,
    ),
    (
        "compatibility_has_devices_of_both_nodes",
        domains::in_one_space::<Compatibility>,
    ),
    (
        "iommufd_has_devices_of_both_nodes",
        domains::in_one_space::<Iommufd>,
    ),
    ("tables_far_from_devices_are_reported", domains::reported),
    (
        "a_space_goes_over_to_the_next_kernel",
        live_update::to_the_next_kernel,
    ),
    (
        "kernel_tables_go_over_to_the_next_kernel",
        kernel_handover::to_the_next_kernel,
    ),
    ("the_unit_reports_a_fault", dma::fault),
    ("provoke_nothing", provoke::nothing),
    ("provoke_never_mapped", provoke::never_mapped),
    ("provoke_after_unmap", provoke::after_unmap),
    ("provoke_read_only", provoke::read_only),
    ("provoke_null", provoke::null),
    ("provoke_physical", provoke::physical_address),
    ("provoke_beyond_the_width", provoke::beyond_the_width),
    ("provoke_no_domain", provoke::no_domain),
    ("provoke_interrupt", provoke::interrupt),
    ("provoke_host_physical", provoke::host_physical),
    (
        "provoke_host_unmapped_strict",
        provoke::host_unmapped_strict,
    ),
    ("provoke_host_unmapped_lazy", provoke::host_unmapped_lazy),
    ("provoke_flood", provoke::flood),
    ("provoke_beyond_the_aperture", provoke::beyond_the_aperture),
    ("provoke_reserved", provoke::reserved),
    ("provoke_memlock", provoke::memlock),
    ("provoke_options", provoke::options),
    ("provoke_firmware", provoke::firmware),
    ("provoke_monitor_group", provoke::monitor_group),
    ("provoke_monitor_memlock", provoke::monitor_memlock),
    ("provoke_monitor_mappings", provoke::monitor_mappings),
    ("provoke_monitor_width", provoke::monitor_width),
    ("provoke_monitor_pool", provoke::monitor_pool),
    ("provoke_monitor_node", provoke::monitor_node),
    (
        "tables_that_the_kernel_shows_are_read",
        kernel_tables::shown,
    ),
    (
        "tables_that_the_kernel_images_are_read",
        kernel_tables::imaged,
    ),
    ("type1_copies_in_4k_pages", |_| dma::copies::<Type1>(Anon4K)),
    ("type1_copies_in_transparent_huge_pages", |_| {
        dma::copies::<Type1>(Thp)
    }),
    ("type1_copies_in_2m_pages", |_| {
        dma::copies::<Type1>(Hugetlb2M)
    }),
    ("type1_takes_what_it_unmaps", dma::unmap::<Type1>),
    ("type1_keeps_read_only_memory", |_| {
        dma::read_only::<Type1>()
    }),
    ("type1_keeps_the_limit", |_| limit::exceeded::<Type1>()),
    ("compatibility_copies_in_4k_pages", |_| {
        dma::copies::<Compatibility>(Anon4K)
    }),
    ("compatibility_copies_in_transparent_huge_pages", |_| {
        dma::copies::<Compatibility>(Thp)
    }),
    ("compatibility_copies_in_2m_pages", |_| {
        dma::copies::<Compatibility>(Hugetlb2M)
    }),
    (
        "compatibility_takes_what_it_unmaps",
        dma::unmap::<Compatibility>,
    ),
    ("compatibility_keeps_read_only_memory", |_| {
        dma::read_only::<Compatibility>()
    }),
    ("compatibility_keeps_the_limit", |_| {
        limit::exceeded::<Compatibility>()
    }),
    ("iommufd_copies_in_4k_pages", |_| {
        dma::copies::<Iommufd>(Anon4K)
    }),
    ("iommufd_copies_in_transparent_huge_pages", |_| {
        dma::copies::<Iommufd>(Thp)
    }),
    ("iommufd_copies_in_2m_pages", |_| {
        dma::copies::<Iommufd>(Hugetlb2M)
    }),
    ("iommufd_takes_what_it_unmaps", dma::unmap::<Iommufd>),
    (
        "iommufd_changes_page_sizes_under_dma",
        page_sizes::under_dma,
    ),
    ("iommufd_keeps_read_only_memory", |_| {
        dma::read_only::<Iommufd>()
    }),
    ("iommufd_keeps_the_limit", |_| limit::exceeded::<Iommufd>()),
    ("the_kernel_knows_what_is_reserved", virtio_iommu::reserved),
    ("type1_maps_64_mib_at_once", |_| {
        virtio_iommu::large::<Type1>()
    }),
    ("iommufd_maps_64_mib_at_once", |_| {
        virtio_iommu::large::<Iommufd>()
    }),
    ("type1_maps_2000_areas_apart", |_| {
        virtio_iommu::many::<Type1>()
    }),
    ("iommufd_maps_2000_areas_apart", |_| {
        virtio_iommu::many::<Iommufd>()
    }),
    ("type1_has_two_devices_apart_and_together", |_| {
        virtio_iommu::two_devices::<Type1>()
    }),
    ("iommufd_has_two_devices_apart_and_together", |_| {
        virtio_iommu::two_devices::<Iommufd>()
    }),
    (
        "iommufd_keeps_its_memory_while_the_rest_goes",
        oversubscribed::keeps::<Iommufd>,
    ),
    ("the_host_holds_nothing_of_the_guest", virtio_iommu::empty),
    ("type1_reads_a_block_of_nvme", |_| examples::nvme("vfio")),
    ("compatibility_reads_a_block_of_nvme", |_| {
        examples::nvme("compat")
    }),
    ("iommufd_reads_a_block_of_nvme", |_| {
        examples::nvme("iommufd")
    }),
    ("iommufd_serves_a_monitor", |_| examples::monitor()),
    ("type1_serves_vfio_ioctls", |_| examples::vfio_ioctls()),
    ("type1_waits_for_an_interrupt", |_| {
        interrupts::message::<Type1>()
    }),
    ("type1_unmasks_a_wired_interrupt", |_| interrupts::wire()),
    ("iommufd_waits_for_an_interrupt", |_| {
        interrupts::message::<Iommufd>()
    }),
    ("type1_reaches_another_device", |_| peer::by_address()),
    ("type1_does_not_charge_registers_among_memory", |_| {
        peer::not_charged()
    }),
    ("compatibility_refuses_another_device", |_| {
        peer::refused_by_the_kernel()
    }),
    ("iommufd_refuses_another_device_by_address", |_| {
        peer::refused_by_name()
    }),
    ("iommufd_reaches_another_device", |_| peer::by_dma_buf()),
    ("a_bar_follows_the_command_register", |_| {
        peer::follows_the_command_register()
    }),
    ("a_revoked_bar_stays_dead_and_is_mapped_anew", |_| {
        peer::stays_dead()
    }),
    ("type1_cuts_with_permission", |_| charges::cut::<Type1>()),
    ("type1_undoes_what_meets_the_limit_in_the_middle", |_| {
        charges::in_the_middle::<Type1>()
    }),
    ("compatibility_cuts_with_permission", |_| {
        charges::cut::<Compatibility>()
    }),
    (
        "compatibility_undoes_what_meets_the_limit_in_the_middle",
        |_| charges::in_the_middle::<Compatibility>(),
    ),
    ("iommufd_cuts_with_permission", |_| {
        charges::cut::<Iommufd>()
    }),
    ("iommufd_undoes_what_meets_the_limit_in_the_middle", |_| {
        charges::in_the_middle::<Iommufd>()
    }),
    ("type1_charges_each_container", |_| {
        charges::twice::<Type1>()
    }),
    ("compatibility_charges_each_container", |_| {
        charges::twice::<Compatibility>()
    }),
    ("iommufd_charges_once", |_| charges::once()),
    ("iommufd_counts_by_process", |_| charges::by_process()),
    ("type1_finds_its_mappings_when_a_device_comes_back", |_| {
        replug::comes_back::<Type1>(true)
    }),
    (
        "compatibility_finds_its_mappings_when_a_device_comes_back",
        |_| replug::comes_back::<Compatibility>(true),
    ),
    (
        "iommufd_finds_its_mappings_when_a_device_comes_back",
        |_| replug::comes_back::<Iommufd>(true),
    ),
    (
        "type1_finds_its_mappings_on_a_device_that_was_removed",
        |_| replug::comes_back::<Type1>(false),
    ),
    (
        "iommufd_finds_its_mappings_on_a_device_that_was_removed",
        |_| replug::comes_back::<Iommufd>(false),
    ),
    ("type1_goes_over_to_a_second_process", |_| {
        handover::to_a_second_process::<Type1>()
    }),
    ("iommufd_goes_over_to_a_second_process", |_| {
        handover::to_a_second_process::<Iommufd>()
    }),
    ("type1_releases_and_restores", |_| {
        release::and_restore::<Type1>()
    }),
    ("compatibility_releases_and_restores", |_| {
        release::and_restore::<Compatibility>()
    }),
    ("iommufd_releases_and_restores", |_| {
        release::and_restore::<Iommufd>()
    }),
    ("type1_cannot_tell_what_is_dirty", |_| {
        tracking::blind::<Type1>()
    }),
    ("compatibility_cannot_tell_what_is_dirty", |_| {
        tracking::blind::<Compatibility>()
    }),
    ("iommufd_cannot_tell_what_is_dirty", |_| {
        tracking::blind::<Iommufd>()
    }),
    ("mocks_tell_what_is_dirty", |_| tracking::dirty()),
    ("a_blind_mock_makes_everything_dirty", |_| {
        tracking::one_is_blind()
    }),
    ("users_in_the_kernel_let_go", |_| tracking::users_let_go()),
    ("queues_of_hardware_hold_on", |_| tracking::queues_hold_on()),
    ("compatibility_is_not_handed_over", |_| {
        handover::stays::<Compatibility>()
    }),
    ("iommufd_hands_over_files_only", |_| {
        handover::stays::<Iommufd>()
    }),
    ("compatibility_is_as_before_when_a_step_fails", |_| {
        faults::everywhere::<Compatibility>()
    }),
    ("iommufd_is_as_before_when_a_step_fails", |_| {
        faults::everywhere::<Iommufd>()
    }),
    ("type1_merges_100000_areas", |_| many::merged()),
    ("iommufd_maps_100000_areas", |_| many::all()),
    ("compatibility_pins_when_a_device_is_opened", |_| {
        semantics::pins_when_opened()
    }),
    ("iommufd_refuses_a_table_that_tells_what_is_dirty", |_| {
        tracking::no_table()
    }),
    ("every_row_that_is_not_shown_is_in_the_table", |_| {
        semantics::names()
    }),
    ("type1_answers_as_the_table_says", |_| {
        semantics::kernel::<Type1>()
    }),
    ("type1_behaves_as_the_table_says", |_| {
        semantics::library::<Type1>()
    }),
    ("compatibility_answers_as_the_table_says", |_| {
        semantics::kernel::<Compatibility>()
    }),
    ("compatibility_behaves_as_the_table_says", |_| {
        semantics::library::<Compatibility>()
    }),
    ("iommufd_answers_as_the_table_says", |_| {
        semantics::kernel::<Iommufd>()
    }),
    ("iommufd_behaves_as_the_table_says", |_| {
        semantics::library::<Iommufd>()
    }),
];

/// The test of this name.
pub(crate) fn find(name: &str) -> Option<Test> {
    let found = TESTS.iter().find(|(known, _)| *known == name);
    found.map(|(_, test)| *test)
}

// The module of the same name holds the tests of the guest; these are of the lists themselves.
#[cfg(test)]
mod lists {
    use guest::machines::{MACHINES, provoked::PROVOKED};

    use super::*;

    #[test]
    fn every_test_of_a_machine_exists_and_every_test_runs_on_a_machine() {
        let machines = || MACHINES.iter().chain(PROVOKED);
        let listed = || machines().flat_map(|machine| machine.tests(None));
        for name in listed() {
            assert!(find(name).is_some(), "{name}");
        }
        for (name, _) in TESTS {
            assert!(listed().any(|known| known == *name), "{name}");
        }
    }
}
