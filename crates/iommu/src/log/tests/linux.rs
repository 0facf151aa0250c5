//! Messages of Linux 7.2 that report a fault, or an error of a unit at work, by file and function: each is decoded.
//!
//! Formats are listed as facts of what a kernel prints; arguments are examples. Left out are messages of probing and
//! of wrong calls inside the kernel, which report nothing that a unit has met.

use std::collections::BTreeMap;

use super::events;
use crate::codes;
use crate::log::{Certainty, Class, Family, LogEvent};

/// A format, and the texts of its arguments.
type Message = (&'static str, &'static [&'static str]);

/// Messages that one function prints for one fault.
struct Group {
    family: Family,
    /// File below `drivers/`.
    file: &'static str,
    function: &'static str,
    /// Prefix by the driver's core or the driver.
    head: &'static str,
    messages: &'static [Message],
    /// Faults among them.
    faults: usize,
}

const fn group(
    family: Family,
    (file, function): (&'static str, &'static str),
    head: &'static str,
    faults: usize,
    messages: &'static [Message],
) -> Group {
    Group {
        family,
        file,
        function,
        head,
        messages,
        faults,
    }
}

const DMAR: (&str, &str) = ("iommu/intel/dmar.c", "dmar_fault_do_one");
const QI: (&str, &str) = ("iommu/intel/dmar.c", "qi_dump_fault, qi_check_fault");
const PTES: (&str, &str) = ("iommu/intel/iommu.c", "dmar_fault_dump_ptes, pgtable_walk");
const PRQ: (&str, &str) = (
    "iommu/intel/prq.c",
    "prq_event_thread, handle_bad_prq_event",
);
const AMD: (&str, &str) = ("iommu/amd/iommu.c", "iommu_print_event");
const AMD_PF: (&str, &str) = ("iommu/amd/iommu.c", "amd_iommu_report_page_fault");
const AMD_RMP: (&str, &str) = (
    "iommu/amd/iommu.c",
    "amd_iommu_report_rmp_fault, amd_iommu_report_rmp_hw_error",
);
const AMD_WAIT: (&str, &str) = ("iommu/amd/iommu.c", "wait_on_sem, dump_command_buffer");
const V3: (&str, &str) = ("iommu/arm/arm-smmu-v3/arm-smmu-v3.c", "arm_smmu_dump_event");
const V3_GERROR: (&str, &str) = (
    "iommu/arm/arm-smmu-v3/arm-smmu-v3.c",
    "arm_smmu_gerror_handler",
);
const V3_CMDQ: (&str, &str) = (
    "iommu/arm/arm-smmu-v3/arm-smmu-v3.c",
    "arm_smmu_cmdq_issue_cmdlist and others",
);
const V3_RESET: (&str, &str) = (
    "iommu/arm/arm-smmu-v3/arm-smmu-v3.c",
    "arm_smmu_device_reset and others",
);
const CMDQV: (&str, &str) = (
    "iommu/arm/arm-smmu-v3/tegra241-cmdqv.c",
    "tegra241_cmdqv_isr and others",
);
const V2: (&str, &str) = (
    "iommu/arm/arm-smmu/arm-smmu.c",
    "arm_smmu_print_context_fault_info",
);
const V2_GLOBAL: (&str, &str) = ("iommu/arm/arm-smmu/arm-smmu.c", "arm_smmu_global_fault");
const V2_SYNC: (&str, &str) = ("iommu/arm/arm-smmu/arm-smmu.c", "__arm_smmu_tlb_sync");
const NVIDIA: (&str, &str) = (
    "iommu/arm/arm-smmu/arm-smmu-nvidia.c",
    "nvidia_smmu_context_fault_bank and others",
);
const QCOM: (&str, &str) = (
    "iommu/arm/arm-smmu/arm-smmu-qcom-debug.c",
    "qcom_smmu_context_fault and others",
);
const QCOM_IOMMU: (&str, &str) = ("iommu/arm/arm-smmu/qcom_iommu.c", "qcom_iommu_fault");
const ADRENO: (&str, &str) = ("gpu/drm/msm/adreno/adreno_gpu.c", "adreno_fault_handler");
const MSM: (&str, &str) = (
    "iommu/msm_iommu.c",
    "msm_iommu_fault_handler, print_ctx_regs",
);
const RISCV: (&str, &str) = ("iommu/riscv/iommu.c", "riscv_iommu_fault");
const RISCV_QUEUE: (&str, &str) = ("iommu/riscv/iommu.c", "riscv_iommu_cmdq_process and others");
const DART: (&str, &str) = (
    "iommu/apple-dart.c",
    "apple_dart_t8020_irq, apple_dart_t8110_irq",
);
const ROCKCHIP: (&str, &str) = ("iommu/rockchip-iommu.c", "rk_iommu_irq, log_iova");
const SUN50I: (&str, &str) = ("iommu/sun50i-iommu.c", "sun50i_iommu_report_fault");
const MTK: (&str, &str) = ("iommu/mtk_iommu.c", "mtk_iommu_isr");
const MTK1: (&str, &str) = ("iommu/mtk_iommu_v1.c", "mtk_iommu_v1_isr");
const EXYNOS: (&str, &str) = (
    "iommu/exynos-iommu.c",
    "show_fault_information, exynos_sysmmu_irq",
);
const TEGRA: (&str, &str) = ("memory/tegra/mc.c", "tegra30_mc_handle_irq");
const IPMMU: (&str, &str) = ("iommu/ipmmu-vmsa.c", "ipmmu_domain_irq");
const OMAP: (&str, &str) = ("iommu/omap-iommu.c", "iommu_fault_handler");
const VIRTIO: (&str, &str) = ("iommu/virtio-iommu.c", "viommu_fault_handler");
const VSI: (&str, &str) = ("iommu/vsi-iommu.c", "vsi_iommu_irq");
const PAMU: (&str, &str) = ("iommu/fsl_pamu.c", "pamu_av_isr");

const SMMU3: &str = "arm-smmu-v3 arm-smmu-v3.0.auto: ";
const SMMU2: &str = "arm-smmu 15000000.iommu: ";

const CONTEXT: &str =
    "Unhandled context fault: fsr=0x%x, iova=0x%08lx, fsynr=0x%x, cbfrsynra=0x%x, cb=%d\n";
const GLOBAL: &str = "\tGFSR 0x%08x, GFSYNR0 0x%08x, GFSYNR1 0x%08x, GFSYNR2 0x%08x\n";
const TRANSLATION: &str = "translation fault: status:0x%x stream:%d code:0x%x (%s) at 0x%llx";

#[rustfmt::skip]
const GROUPS: &[Group] = &[
    group(Family::Vtd, ("iommu/intel/dmar.c", "dmar_fault"), "DMAR: ", 0, &[("DRHD: handling fault status reg %x\n", &["3"])]),
    group(Family::Vtd, DMAR, "DMAR: ", 1, &[("[INTR-REMAP] Request device [%04x:%02x:%02x.%d] fault index 0x%llx [fault reason 0x%02x] %s\n", &["0000", "f0", "1f", "0", "25", "25", "Blocked a compatibility format interrupt request"])]),
    group(Family::Vtd, DMAR, "DMAR: ", 1, &[("[%s NO_PASID] Request device [%04x:%02x:%02x.%d] fault addr 0x%llx [fault reason 0x%02x] %s\n", &["DMA Write", "0000", "00", "12", "0", "1000", "05", "PTE Write access is not set"])]),
    group(Family::Vtd, DMAR, "DMAR: ", 1, &[("[%s PASID 0x%x] Request device [%04x:%02x:%02x.%d] fault addr 0x%llx [fault reason 0x%02x] %s\n", &["DMA Read", "1", "0001", "6a", "01", "0", "7f0000001000", "71", "SM: Present bit in first-level paging entry is clear"])]),
    group(Family::Vtd, QI, "DMAR: ", 3, &[
        ("VT-d detected Invalidation Queue Error: Reason %llx", &["5"]),
        ("VT-d detected Invalidation Time-out Error: SID %llx", &["100"]),
        ("VT-d detected Invalidation Completion Error: SID %llx", &["0"]),
        ("QI HEAD: %s qw0 = 0x%llx, qw1 = 0x%llx\n", &["Device-TLB Invalidation", "3", "1000"]),
        ("QI PRIOR: %s qw0 = 0x%llx, qw1 = 0x%llx\n", &["Invalidation Wait", "5", "1000"]),
    ]),
    group(Family::Vtd, QI, "DMAR: ", 1, &[("VT-d detected Invalidation Queue Error: Reason %llx", &["5"]), ("Invalidation Queue Error (IQE) cleared\n", &[])]),
    group(Family::Vtd, QI, "DMAR: ", 1, &[("VT-d detected Invalidation Time-out Error: SID %llx", &["0"]), ("Invalidation Time-out Error (ITE) cleared\n", &[])]),
    group(Family::Vtd, QI, "DMAR: ", 1, &[("VT-d detected Invalidation Completion Error: SID %llx", &["0"]), ("Invalidation Completion Error (ICE) cleared\n", &[])]),
    group(Family::Vtd, PTES, "DMAR: ", 0, &[("Dump %s table entries for IOVA 0x%llx\n", &["dmar0", "1000"]), ("root table is not present\n", &[])]),
    group(Family::Vtd, PTES, "DMAR: ", 0, &[("Dump %s table entries for IOVA 0x%llx\n", &["dmar0", "1000"]), ("root entry: 0x%016llx", &["0000000100a8b001"]), ("context table is not present\n", &[])]),
    group(Family::Vtd, PTES, "DMAR: ", 0, &[
        ("Dump %s table entries for IOVA 0x%llx\n", &["dmar0", "1000"]),
        ("scalable mode root entry: hi 0x%016llx, low 0x%016llx\n", &["0000000000000000", "0000000100a8b001"]),
        ("context entry: hi 0x%016llx, low 0x%016llx\n", &["0000000000000000", "0000000100a8c401"]),
        ("pasid dir entry: 0x%016llx\n", &["0000000100a8d001"]),
        ("pasid table entry[%d]: 0x%016llx\n", &["0", "0000000100a8e0c9"]),
        ("pte level: %d, pte value: 0x%016llx\n", &["4", "0000000000000000"]),
        ("page table not present at level %d\n", &["3"]),
    ]),
    group(Family::Vtd, PTES, "DMAR: ", 0, &[("Dump %s table entries for IOVA 0x%llx\n", &["dmar0", "1000"]), ("legacy mode page table is not present\n", &[])]),
    group(Family::Vtd, PTES, "DMAR: ", 0, &[("Dump %s table entries for IOVA 0x%llx\n", &["dmar0", "1000"]), ("pasid directory table is not present\n", &[])]),
    group(Family::Vtd, PTES, "DMAR: ", 0, &[("Dump %s table entries for IOVA 0x%llx\n", &["dmar0", "1000"]), ("pasid table is not present\n", &[])]),
    group(Family::Vtd, PTES, "DMAR: ", 0, &[("Dump %s table entries for IOVA 0x%llx\n", &["dmar0", "1000"]), ("scalable mode page table is not present\n", &[])]),
    group(Family::Vtd, PRQ, "DMAR: ", 1, &[("IOMMU: %s: Address is not canonical\n", &["dmar0"]), ("%s: Invalid page request: %08llx %08llx\n", &["dmar0", "1000101", "ffff000000001003"])]),
    group(Family::Vtd, PRQ, "DMAR: ", 1, &[("IOMMU: %s: Page request in Privilege Mode\n", &["dmar0"]), ("%s: Invalid page request: %08llx %08llx\n", &["dmar0", "1000101", "1003"])]),
    group(Family::Vtd, PRQ, "DMAR: ", 1, &[("IOMMU: %s: Execution request not supported\n", &["dmar0"]), ("%s: Invalid page request: %08llx %08llx\n", &["dmar0", "1000101", "1003"])]),
    group(Family::Vtd, PRQ, "DMAR: ", 0, &[("IOMMU: %s: PRQ overflow detected\n", &["dmar0"])]),
    group(Family::Vtd, ("iommu/intel/iommu.c", "__iommu_flush_iotlb"), "DMAR: ", 1, &[("Flush IOTLB failed\n", &[])]),
    group(Family::Vtd, ("iommu/intel/iommu.h", "IOMMU_WAIT_OP"), "Kernel panic - not syncing: ", 1, &[("DMAR hardware is malfunctioning\n", &[])]),

    group(Family::AmdVi, AMD_PF, "nvme 0000:01:00.0: AMD-Vi: ", 1, &[("Event logged [IO_PAGE_FAULT domain=0x%04x address=0x%llx flags=0x%04x]\n", &["000e", "1000", "0070"])]),
    group(Family::AmdVi, AMD_PF, "AMD-Vi: ", 1, &[("Event logged [IO_PAGE_FAULT device=%04x:%02x:%02x.%x domain=0x%04x address=0x%llx flags=0x%04x]\n", &["0000", "02", "00", "0", "0003", "1000", "0000"])]),
    group(Family::AmdVi, AMD_PF, "AMD-Vi: ", 1, &[("Event logged [Device not attached to domain properly]\n", &[]), ("  device=%04x:%02x:%02x.%x domain=0x%04x\n", &["0000", "02", "00", "0", "0003"])]),
    group(Family::AmdVi, AMD_RMP, "nvme 0000:01:00.0: AMD-Vi: ", 1, &[("Event logged [RMP_HW_ERROR vmg_tag=0x%04x, spa=0x%llx, flags=0x%04x]\n", &["0000", "1000", "0000"])]),
    group(Family::AmdVi, AMD_RMP, "AMD-Vi: ", 1, &[("Event logged [RMP_HW_ERROR device=%04x:%02x:%02x.%x, vmg_tag=0x%04x, spa=0x%llx, flags=0x%04x]\n", &["0000", "02", "00", "0", "0000", "1000", "0000"])]),
    group(Family::AmdVi, AMD_RMP, "nvme 0000:01:00.0: AMD-Vi: ", 1, &[("Event logged [RMP_PAGE_FAULT vmg_tag=0x%04x, gpa=0x%llx, flags_rmp=0x%04x, flags=0x%04x]\n", &["0000", "1000", "0000", "0020"])]),
    group(Family::AmdVi, AMD_RMP, "AMD-Vi: ", 1, &[("Event logged [RMP_PAGE_FAULT device=%04x:%02x:%02x.%x, vmg_tag=0x%04x, gpa=0x%llx, flags_rmp=0x%04x, flags=0x%04x]\n", &["0000", "02", "00", "0", "0000", "1000", "0000", "0020"])]),
    group(Family::AmdVi, AMD, "iommu ivhd0: AMD-Vi: ", 1, &[("Event logged [ILLEGAL_DEV_TABLE_ENTRY device=%04x:%02x:%02x.%x pasid=0x%05x address=0x%llx flags=0x%04x]\n", &["0000", "02", "00", "0", "00000", "1000", "0a00"]), ("Control Reg : 0x%llx\n", &["1"])]),
    group(Family::AmdVi, AMD, "AMD-Vi: ", 1, &[("Event logged [ILLEGAL_DEV_TABLE_ENTRY device=%04x:%02x:%02x.%x pasid=0x%05x address=0x%llx flags=0x%04x]\n", &["0000", "02", "00", "0", "00000", "1000", "0a00"]), ("DTE[%d]: %016llx\n", &["0", "6190000000000003"])]),
    group(Family::AmdVi, AMD, "iommu ivhd0: AMD-Vi: ", 1, &[("Event logged [DEV_TAB_HARDWARE_ERROR device=%04x:%02x:%02x.%x address=0x%llx flags=0x%04x]\n", &["0000", "02", "00", "0", "1000", "0000"])]),
    group(Family::AmdVi, AMD, "iommu ivhd0: AMD-Vi: ", 1, &[("Event logged [PAGE_TAB_HARDWARE_ERROR device=%04x:%02x:%02x.%x pasid=0x%04x address=0x%llx flags=0x%04x]\n", &["0000", "02", "00", "0", "0000", "1000", "0000"])]),
    group(Family::AmdVi, AMD, "AMD-Vi: ", 1, &[("Event logged [ILLEGAL_COMMAND_ERROR address=0x%llx]\n", &["1000"]), ("CMD[%d]: %08x\n", &["0", "08000000"])]),
    group(Family::AmdVi, AMD, "iommu ivhd0: AMD-Vi: ", 1, &[("Event logged [COMMAND_HARDWARE_ERROR address=0x%llx flags=0x%04x]\n", &["1000", "0000"])]),
    group(Family::AmdVi, AMD, "iommu ivhd0: AMD-Vi: ", 1, &[("Event logged [IOTLB_INV_TIMEOUT device=%04x:%02x:%02x.%x address=0x%llx]\n", &["0000", "02", "00", "0", "1000"])]),
    group(Family::AmdVi, AMD, "iommu ivhd0: AMD-Vi: ", 1, &[("Event logged [INVALID_DEVICE_REQUEST device=%04x:%02x:%02x.%x pasid=0x%05x address=0x%llx flags=0x%04x]\n", &["0000", "02", "00", "0", "00000", "fdf8000000", "0a00"])]),
    group(Family::AmdVi, AMD, "iommu ivhd0: AMD-Vi: ", 1, &[("Event logged [INVALID_PPR_REQUEST device=%04x:%02x:%02x.%x pasid=0x%05x address=0x%llx flags=0x%04x tag=0x%03x]\n", &["0000", "02", "00", "0", "00001", "1000", "0000", "001"])]),
    group(Family::AmdVi, AMD, "iommu ivhd0: AMD-Vi: ", 1, &[("Event logged [UNKNOWN event[0]=0x%08x event[1]=0x%08x event[2]=0x%08x event[3]=0x%08x\n", &["00000200", "f0000000", "00001000", "00000000"])]),
    group(Family::AmdVi, AMD, "AMD-Vi: ", 1, &[("No event written to event log\n", &[])]),
    group(Family::AmdVi, AMD_WAIT, "AMD-Vi: ", 1, &[
        ("IOMMU %04x:%02x:%02x.%01x: Completion-Wait loop timed out\n", &["0000", "00", "00", "2"]),
        ("CMD Buffer head=%llu tail=%llu\n", &["1", "2"]),
        ("%3d: %08x %08x %08x %08x\n", &["  0", "08000000", "00000000", "00000000", "00000000"]),
    ]),
    group(Family::AmdVi, ("iommu/amd/iommu.c", "__iommu_queue_command_sync"), "AMD-Vi: ", 1, &[("Command buffer timeout\n", &[])]),
    group(Family::AmdVi, ("iommu/amd/iommu.c", "iommu_poll_ga_log"), "AMD-Vi: ", 1, &[("GA log notifier failed.\n", &[])]),
    group(Family::AmdVi, ("iommu/amd/init.c", "amd_iommu_restart_log"), "AMD-Vi: ", 0, &[("IOMMU %s log restarting\n", &["Event"])]),
    group(Family::AmdVi, ("iommu/amd/ppr.c", "ppr_is_valid, iommu_call_iopf_notifier"), "AMD-Vi: ", 2, &[("Unknown PPR request received\n", &[]), ("Invalid PASID : 0x%x, device : 0x%x\n", &["1", "200"])]),

    group(Family::SmmuV3, V3, SMMU3, 1, &[
        ("event 0x%02x received:\n", &["10"]),
        ("\t0x%016llx\n", &["0000010000000010"]),
        ("\t0x%016llx\n", &["0000020000000000"]),
        ("\t0x%016llx\n", &["00000000fff00000"]),
        ("\t0x%016llx\n", &["0000000000000000"]),
        ("event: %s client: %s sid: %#x ssid: %#x iova: %#llx ipa: %#llx", &["F_TRANSLATION", "0000:01:00.0", "0x100", "0x0", "0xfff00000", "0x0"]),
        ("%s %s %s %s \"%s\"%s%s stag: %#x", &["unpriv", "data", "write", "s1", "Input address caused fault", "", "", "0x0"]),
    ]),
    group(Family::SmmuV3, V3, SMMU3, 1, &[
        ("event 0x%02x received:\n", &["03"]),
        ("\t0x%016llx\n", &["0000010000000003"]),
        ("\t0x%016llx\n", &["0000000000000000"]),
        ("\t0x%016llx\n", &["0000000000000000"]),
        ("\t0x%016llx\n", &["0000000000001000"]),
        ("event: %s client: %s sid: %#x ssid: %#x fetch_addr: %#llx", &["F_STE_FETCH", "(unassigned sid)", "0x100", "0x0", "0x1000"]),
    ]),
    group(Family::SmmuV3, V3, SMMU3, 1, &[
        ("event 0x%02x received:\n", &["04"]),
        ("\t0x%016llx\n", &["0000010000000004"]),
        ("\t0x%016llx\n", &["0000000000000000"]),
        ("\t0x%016llx\n", &["0000000000000000"]),
        ("\t0x%016llx\n", &["0000000000000000"]),
        ("event: %s client: %s sid: %#x ssid: %#x", &["C_BAD_STE", "0000:01:00.0", "0x100", "0x0"]),
    ]),
    group(Family::SmmuV3, V3_GERROR, SMMU3, 1, &[
        ("unexpected global error reported (0x%08x), this could be serious\n", &["000001fd"]),
        ("device has entered Service Failure Mode!\n", &[]),
        ("GERROR MSI write aborted\n", &[]),
        ("PRIQ MSI write aborted\n", &[]),
        ("EVTQ MSI write aborted\n", &[]),
        ("CMDQ MSI write aborted\n", &[]),
        ("PRIQ write aborted -- events may have been lost\n", &[]),
        ("EVTQ write aborted -- events may have been lost\n", &[]),
        ("CMDQ error (cons 0x%08x): %s\n", &["030120b7", "ATC invalidate timeout"]),
        ("retrying command fetch\n", &[]),
        ("skipping command in error state:\n", &[]),
        ("\t0x%016llx\n", &["0000000000000040"]),
    ]),
    group(Family::SmmuV3, V3_CMDQ, SMMU3, 1, &[("CMDQ timeout\n", &[])]),
    group(Family::SmmuV3, V3_CMDQ, SMMU3, 1, &[("CMD_SYNC timeout at 0x%08x [hwprod 0x%08x, hwcons 0x%08x]\n", &["00000a3e", "00000a3f", "00000a1b"])]),
    group(Family::SmmuV3, V3_CMDQ, SMMU3, 1, &[("GBPA not responding to update\n", &[])]),
    group(Family::SmmuV3, V3_RESET, SMMU3, 7, &[
        ("failed to disable irqs\n", &[]),
        ("failed to clear cr0\n", &[]),
        ("failed to enable command queue\n", &[]),
        ("failed to enable event queue\n", &[]),
        ("failed to enable PRI queue\n", &[]),
        ("failed to enable ATS check\n", &[]),
        ("failed to enable SMMU interface\n", &[]),
    ]),
    group(Family::SmmuV3, ("iommu/arm/arm-smmu-v3/arm-smmu-v3.c", "arm_smmu_evtq_thread"), SMMU3, 0, &[("EVTQ overflow detected -- events lost\n", &[])]),
    group(Family::SmmuV3, ("iommu/arm/arm-smmu-v3/arm-smmu-v3.c", "arm_smmu_priq_thread"), SMMU3, 0, &[("PRIQ overflow detected -- requests lost\n", &[])]),
    group(Family::SmmuV3, ("iommu/arm/arm-smmu-v3/arm-smmu-v3.c", "arm_smmu_handle_ppr"), SMMU3, 1, &[
        ("unexpected PRI request received:\n", &[]),
        ("\tsid 0x%08x.0x%05x: [%u%s] %sprivileged %s%s%s access at iova 0x%016llx\n", &["00000008", "00001", "1", "L", "un", "R", "W", "", "0000000000001000"]),
    ]),
    group(Family::SmmuV3, CMDQV, "acpi NVDA200C:00: ", 1, &[("unexpected error reported. %s\n", &["vintf_map: 0000000000000001, vcmdq_map 00000000:00000000:00000000:00000001"])]),
    group(Family::SmmuV3, CMDQV, "acpi NVDA200C:00: ", 1, &[("%sGERRORN=0x%X, GERROR=0x%X, CONS=0x%X\n", &["VINTF0: VCMDQ0/LVCMDQ0: ", "0", "1", "0"])]),
    group(Family::SmmuV3, CMDQV, "acpi NVDA200C:00: ", 1, &[("%suncleared error detected, resetting\n", &["VINTF0: VCMDQ0/LVCMDQ0: "])]),
    group(Family::SmmuV3, CMDQV, "acpi NVDA200C:00: ", 1, &[("%sfailed to %sable, STATUS=0x%08X\n", &["VINTF0: ", "en", "00000000"])]),

    group(Family::SmmuV2, V2, SMMU2, 1, &[
        (CONTEXT, &["402", "fd7ff000", "540003", "19c3", "10"]),
        ("FSR    = %08x [%s%sFormat=%u%s%s%s%s%s%s%s%s], SID=0x%x\n", &["00000402", "", "", "2", "", "", "", "", "", "", "", " TF", "19c3"]),
        ("FSYNR0 = %08x [S1CBNDX=%u%s%s%s%s%s%s PLVL=%u]\n", &["00540003", "84", "", "", "", "", "", "", "3"]),
    ]),
    group(Family::SmmuV2, V2_GLOBAL, SMMU2, 1, &[("Unexpected global fault, this could be serious\n", &[]), (GLOBAL, &["00000002", "00000000", "00000421", "00000000"])]),
    group(Family::SmmuV2, V2_GLOBAL, SMMU2, 1, &[("Blocked unknown Stream ID 0x%hx; boot with \"arm-smmu.disable_bypass=0\" to allow, but this may have security implications\n", &["421"]), (GLOBAL, &["00000002", "00000000", "00000421", "00000000"])]),
    group(Family::SmmuV2, V2_SYNC, SMMU2, 1, &[("TLB sync timed out -- SMMU may be deadlocked\n", &[])]),
    group(Family::SmmuV2, ("iommu/arm/arm-smmu/arm-smmu.c", "arm_smmu_iova_to_phys_hard"), SMMU2, 1, &[("iova to phys timed out on %pad. Falling back to software table walk.\n", &["0x1000"])]),
    group(Family::SmmuV2, ("iommu/arm/arm-smmu/arm-smmu.c", "arm_smmu_iova_to_phys_hard"), SMMU2, 1, &[("translation fault!\n", &[]), ("PAR = 0x%llx\n", &["3"])]),
    group(Family::SmmuV2, NVIDIA, SMMU2, 1, &[("TLB sync timed out -- SMMU may be deadlocked\n", &[])]),
    group(Family::SmmuV2, NVIDIA, SMMU2, 1, &[("Unexpected global fault, this could be serious\n", &[]), (GLOBAL, &["80000002", "00000002", "00000421", "00000000"])]),
    group(Family::SmmuV2, NVIDIA, SMMU2, 1, &[(CONTEXT, &["402", "fd7ff000", "540003", "8c", "10"])]),
    group(Family::SmmuV2, QCOM, SMMU2, 1, &[
        (CONTEXT, &["402", "fd7ff000", "540003", "19c3", "10"]),
        ("soft iova-to-phys=%pa\n", &["0x0000000000000000"]),
        ("SOFTWARE TABLE WALK FAILED! Looks like %s accessed an unmapped address!\n", &["a600000.usb"]),
        ("hard iova-to-phys (ATOS)=%pa\n", &["0x0000000000001000"]),
        ("hard iova-to-phys (ATOS) failed\n", &[]),
    ]),
    group(Family::SmmuV2, QCOM, SMMU2, 1, &[("TLB sync timed out -- SMMU may be deadlocked\n", &[]), ("TBU: power_status %#x sync_inv_ack %#x sync_inv_progress %#x\n", &["0x1", "0x1", "0x0"])]),
    group(Family::SmmuV2, QCOM, "qcom-tbu 15185000.tbu: ", 1, &[("Timeout while trying to halt TBU!\n", &[])]),
    group(Family::SmmuV2, QCOM, "qcom-tbu 15185000.tbu: ", 1, &[("ATOS generated a fault interrupt! PAR = %llx, SID=0x%x\n", &["3", "19c3"])]),
    group(Family::SmmuV2, QCOM, "qcom-tbu 15185000.tbu: ", 1, &[("ATOS translation timed out!\n", &[])]),
    group(Family::SmmuV2, QCOM, SMMU2, 1, &[("ATOS results differed across TLBIALL... (before: %pa after: %pa)\n", &["0x1000", "0x2000"])]),
    group(Family::SmmuV2, ADRENO, "", 1, &[("*** gpu fault: iova=%.16lx flags=%d (%u,%u,%u,%u)\n", &["0000000000001000", "1", "0", "0", "0", "0"])]),
    group(Family::SmmuV2, ADRENO, "", 1, &[("*** gpu fault: ttbr0=%.16llx iova=%.16lx dir=%s type=%s source=%s (%u,%u,%u,%u)\n", &["0000000101c8c000", "0000000000001000", "READ", "TRANSLATION", "CP", "0", "0", "0", "0"])]),
    group(Family::Qualcomm, QCOM_IOMMU, "qcom-iommu-ctx 1f09000.iommu-ctx: ", 1, &[("Unhandled context fault: fsr=0x%x, iova=0x%016llx, fsynr=0x%x, cb=%d\n", &["402", "0000000000001000", "1", "2"])]),
    group(Family::Qualcomm, ("iommu/arm/arm-smmu/qcom_iommu.c", "qcom_iommu_tlb_sync"), "qcom-iommu-ctx 1f09000.iommu-ctx: ", 1, &[("timeout waiting for TLB SYNC\n", &[])]),
    group(Family::Qualcomm, MSM, "msm_iommu: ", 1, &[
        ("Unexpected IOMMU page fault!\n", &[]),
        ("base = %08x\n", &["07500000"]),
        ("Fault occurred in context %d.\n", &["0"]),
        ("Interesting registers:\n", &[]),
        ("FAR    = %08x    PAR    = %08x\n", &["00001000", "00000000"]),
        ("FSR    = %08x [%s%s%s%s%s%s%s%s%s%s]\n", &["00000002", "TF ", "", "", "", "", "", "", "", "", ""]),
        ("FSYNR0 = %08x    FSYNR1 = %08x\n", &["00000010", "00000000"]),
        ("TTBR0  = %08x    TTBR1  = %08x\n", &["80000000", "00000000"]),
        ("SCTLR  = %08x    ACTLR  = %08x\n", &["00001043", "00000000"]),
    ]),

    group(Family::Riscv, RISCV, "riscv-iommu 0000:00:01.0: ", 1, &[("Fault %d devid: 0x%x iotval: %llx iotval2: %llx\n", &["13", "8", "1000", "0"])]),
    group(Family::Riscv, RISCV_QUEUE, "riscv-iommu 0000:00:01.0: ", 1, &[("Queue #%u error; fault:%d timeout:%d illegal:%d fence_w_ip:%d\n", &["0", "0", "1", "0", "0"])]),
    group(Family::Riscv, RISCV_QUEUE, "riscv-iommu 0000:00:01.0: ", 1, &[("Queue #%u error; memory fault:%d overflow:%d\n", &["1", "1", "0"])]),
    group(Family::Riscv, RISCV_QUEUE, "riscv-iommu 0000:00:01.0: ", 0, &[("Queue #%u error; memory fault:%d overflow:%d\n", &["1", "0", "1"])]),
    group(Family::Riscv, RISCV_QUEUE, "riscv-iommu 0000:00:01.0: ", 1, &[("Hardware error: queue access timeout\n", &[])]),
    group(Family::Riscv, RISCV_QUEUE, "riscv-iommu 0000:00:01.0: ", 1, &[("Hardware error: command enqueue failed\n", &[])]),
    group(Family::Riscv, RISCV_QUEUE, "riscv-iommu 0000:00:01.0: ", 1, &[("Hardware error: command execution timeout\n", &[])]),
    group(Family::Riscv, RISCV_QUEUE, "riscv-iommu 0000:00:01.0: ", 1, &[("queue #%u failed to start\n", &["0"])]),
    group(Family::Riscv, RISCV_QUEUE, "riscv-iommu 0000:00:01.0: ", 1, &[("fail to disable hardware queue #%u, csr 0x%x\n", &["0", "10000"])]),
    group(Family::Riscv, ("iommu/riscv/iommu.c", "riscv_iommu_iodir_set_mode"), "riscv-iommu 0000:00:01.0: ", 1, &[("timeout when setting ddtp (ddt mode: %u, read: %llx)\n", &["4", "10"])]),
    group(Family::Riscv, ("iommu/riscv/iommu.c", "riscv_iommu_iodir_set_mode"), "riscv-iommu 0000:00:01.0: ", 1, &[("DDTP update failed hw: %llx vs %llx\n", &["0", "4"])]),

    group(Family::Riscv, ("iommu/riscv/iommu.c", "riscv_iommu_iodir_set_mode"), "riscv-iommu 0000:00:01.0: ", 1, &[("DDTP hw mode %u, failed to set %u\n", &["0", "4"])]),
    group(Family::Dart, DART, "apple-dart 231304000.iommu: ", 1, &[(TRANSLATION, &["80000001", "0", "1", "NO TTBR FOR IOVA", "1000"])]),
    group(Family::Dart, DART, "apple-dart 231304000.iommu: ", 1, &[(TRANSLATION, &["80000002", "0", "2", "NO PGD FOR IOVA", "1000"])]),
    group(Family::Dart, DART, "apple-dart 231304000.iommu: ", 1, &[(TRANSLATION, &["80000002", "0", "2", "NO PMD FOR IOVA", "1000"])]),
    group(Family::Dart, DART, "apple-dart 231304000.iommu: ", 1, &[(TRANSLATION, &["80000004", "0", "4", "NO PTE FOR IOVA", "1000"])]),
    group(Family::Dart, DART, "apple-dart 231304000.iommu: ", 1, &[(TRANSLATION, &["80000008", "0", "8", "WRITE FAULT", "1000"])]),
    group(Family::Dart, DART, "apple-dart 231304000.iommu: ", 1, &[(TRANSLATION, &["80000010", "0", "10", "READ FAULT", "1000"])]),
    group(Family::Dart, DART, "apple-dart 231304000.iommu: ", 1, &[(TRANSLATION, &["80000020", "0", "20", "unknown", "1000"])]),
    group(Family::Dart, ("iommu/apple-dart.c", "apple_dart_t8020_hw_stream_command"), "apple-dart 231304000.iommu: ", 1, &[("busy bit did not clear after command %x for streams %lx\n", &["100000", "1"])]),
    group(Family::Dart, ("iommu/apple-dart.c", "apple_dart_t8110_hw_tlb_command"), "apple-dart 231304000.iommu: ", 1, &[("busy bit did not clear after command %x for stream %d\n", &["1", "1"])]),

    group(Family::Rockchip, ROCKCHIP, "rk_iommu ff460f00.iommu: ", 1, &[
        ("Page fault at %pad of type %s\n", &["0x00000000f7c00000", "read"]),
        ("iova = %pad: dte_index: %#03x pte_index: %#03x page_offset: %#03x\n", &["0x00000000f7c00000", "0x3df", "0x0", "0x0"]),
        ("mmu_dte_addr: %pa dte@%pa: %#08x valid: %u pte@%pa: %#08x valid: %u page@%pa flags: %#03x\n", &["0x000000007c2a5000", "0x000000007c2a5f7c", "0x7c2a6001", "1", "0x000000007c2a6000", "0x000000", "0", "0x0000000000000000", "0x0"]),
        ("Page fault while iommu not attached to domain?\n", &[]),
    ]),
    group(Family::Rockchip, ROCKCHIP, "rk_iommu ff460f00.iommu: ", 1, &[("BUS_ERROR occurred at %pad\n", &["0x00000000f7c00000"])]),
    group(Family::Rockchip, ROCKCHIP, "rk_iommu ff460f00.iommu: ", 1, &[("unexpected int_status: %#08x\n", &["0x000004"])]),
    group(Family::Rockchip, ROCKCHIP, "rk_iommu ff460f00.iommu: ", 1, &[("Enable stall request timed out, status: %#08x\n", &["0x000018"])]),
    group(Family::Rockchip, ROCKCHIP, "rk_iommu ff460f00.iommu: ", 1, &[("Disable stall request timed out, status: %#08x\n", &["0x000018"])]),
    group(Family::Rockchip, ROCKCHIP, "rk_iommu ff460f00.iommu: ", 1, &[("Enable paging request timed out, status: %#08x\n", &["0x000018"])]),
    group(Family::Rockchip, ROCKCHIP, "rk_iommu ff460f00.iommu: ", 1, &[("Disable paging request timed out, status: %#08x\n", &["0x000018"])]),
    group(Family::Rockchip, ROCKCHIP, "rk_iommu ff460f00.iommu: ", 1, &[("Error during raw reset. MMU_DTE_ADDR is not functioning\n", &[])]),
    group(Family::Rockchip, ROCKCHIP, "rk_iommu ff460f00.iommu: ", 1, &[("FORCE_RESET command timed out\n", &[])]),

    group(Family::Allwinner, SUN50I, "sun50i-iommu 30f0000.iommu: ", 1, &[("Page fault for %pad (master %d, dir %s)\n", &["0x00000000fff00000", "1", "wr"]), ("Page fault while iommu not attached to any domain?\n", &[])]),
    group(Family::Allwinner, SUN50I, "sun50i-iommu 30f0000.iommu: ", 1, &[("TLB invalidation timed out!\n", &[])]),
    group(Family::Allwinner, SUN50I, "sun50i-iommu 30f0000.iommu: ", 1, &[("PTW cache invalidation timed out!\n", &[])]),
    group(Family::Allwinner, SUN50I, "sun50i-iommu 30f0000.iommu: ", 1, &[("TLB Flush timed out!\n", &[])]),
    group(Family::MediaTek, MTK, "mtk-iommu 10205000.iommu: ", 1, &[("fault type=0x%x iova=0x%llx pa=0x%llx master=0x%x(larb=%d port=%d) layer=%d %s\n", &["280", "1000", "0", "a", "0", "8", "1", "read"])]),
    group(Family::MediaTek, MTK, "mtk-iommu 10205000.iommu: ", 1, &[("Partial TLB flush timed out, falling back to full flush\n", &[])]),
    group(Family::MediaTek, MTK1, "mtk-iommu-v1 10205000.iommu: ", 1, &[("fault type=0x%x iova=0x%x pa=0x%x larb=%d port=%d\n", &["280", "1000", "0", "0", "8"])]),
    group(Family::MediaTek, MTK1, "mtk-iommu-v1 10205000.iommu: ", 1, &[("Partial TLB flush timed out, falling back to full flush\n", &[])]),
    group(Family::Exynos, EXYNOS, "exynos-sysmmu 13620000.sysmmu: ", 1, &[("%s: [%s] %s FAULT occurred at %#x\n", &["12340000.codec", "READ", "PAGE", "0x20000000"])]),
    group(Family::Exynos, EXYNOS, "exynos-sysmmu 13620000.sysmmu: ", 1, &[("%s: [%s] %s FAULT occurred at %#x\n", &["12340000.codec", "WRITE", "ACCESS PROTECTION", "0x20000000"])]),
    group(Family::Exynos, EXYNOS, "exynos-sysmmu 13620000.sysmmu: ", 1, &[("Unhandled interrupt bit %u\n", &["9"])]),
    group(Family::Tegra, TEGRA, "tegra-mc 70019000.memory-controller: ", 1, &[("%s: %s%s @%pa: %s (%s%s)\n", &["gpusrd", "", "read", "0x0000000102500000", "Page fault", "SMMU translation error", " [--S]"])]),
    group(Family::Tegra, TEGRA, "tegra-mc 70019000.memory-controller: ", 1, &[("%s: %s%s @%pa: %s (%s%s)\n", &["dc", "secure ", "write", "0x00000000c0000000", "Security violation", "TrustZone violation", ""])]),
    group(Family::Ipmmu, IPMMU, "ipmmu-vmsa febd0000.iommu: ", 1, &[("Multiple TLB hits @0x%lx\n", &["70000000"])]),
    group(Family::Ipmmu, IPMMU, "ipmmu-vmsa febd0000.iommu: ", 1, &[("Page Table Walk Abort @0x%lx\n", &["70000000"])]),
    group(Family::Ipmmu, IPMMU, "ipmmu-vmsa febd0000.iommu: ", 1, &[("Unhandled fault: status 0x%08x iova 0x%lx\n", &["00000001", "70000000"])]),
    group(Family::Ipmmu, ("iommu/ipmmu-vmsa.c", "ipmmu_tlb_sync"), "ipmmu-vmsa febd0000.iommu: ", 1, &[("TLB sync timed out -- MMU may be deadlocked\n", &[])]),
    group(Family::Omap, OMAP, "omap-iommu 55082000.mmu: ", 1, &[("%s: errs:0x%08x da:0x%08x pgd:0x%p *pgd:px%08x\n", &["55082000.mmu", "00000002", "9f000000", "00000000d1a5e2f3", "00000000"])]),
    group(Family::Omap, OMAP, "omap-iommu 55082000.mmu: ", 1, &[("%s: errs:0x%08x da:0x%08x pgd:0x%p *pgd:0x%08x pte:0x%p *pte:0x%08x\n", &["55082000.mmu", "00000002", "9f000000", "00000000d1a5e2f3", "8f3b4c01", "00000000a1b2c3d4", "00000000"])]),
    group(Family::Virtio, VIRTIO, "virtio_iommu virtio0: ", 1, &[("%s fault from EP %u at %#llx [%s%s%s]\n", &["page", "8", "0x1000", "R", "", ""])]),
    group(Family::Virtio, VIRTIO, "virtio_iommu virtio0: ", 1, &[("%s fault from EP %u\n", &["domain", "8"])]),
    group(Family::Virtio, ("iommu/virtio-iommu.c", "viommu_event_handler"), "virtio_iommu virtio0: ", 1, &[("invalid event buffer (len %u != %zu)\n", &["4", "24"])]),
    group(Family::Verisilicon, VSI, "vsi_iommu fdb50800.iommu: ", 1, &[("unexpected int_status=%08x\n", &["00000001"])]),
    group(Family::Pamu, PAMU, "fsl-pamu: pamu_av_isr: ", 1, &[
        ("access violation interrupt\n", &[]),
        ("POES1=%08x\n", &["00000000"]),
        ("POES2=%08x\n", &["00000000"]),
        ("AVS1=%08x\n", &["00420001"]),
        ("AVS2=%08x\n", &["00000000"]),
        ("AVA=%016llx\n", &["0000000000001000"]),
        ("UDAD=%08x\n", &["00000000"]),
        ("POEA=%016llx\n", &["0000000000001000"]),
        ("PAACE[%u]=%08x\n", &["0", "00000000"]),
        ("Disabling liodn %x\n", &["42"]),
    ]),
];

/// Text that `format` prints for these arguments.
fn print(format: &str, arguments: &[&str]) -> String {
    let mut text = String::new();
    let mut arguments = arguments.iter();
    let mut rest = format;
    while let Some((before, conversion)) = rest.split_once('%') {
        text.push_str(before);
        text.push_str(arguments.next().expect(format));
        let kind = conversion
            .find(|letter: char| "diuxXsp".contains(letter))
            .expect(format);
        rest = &conversion[kind + 1..];
        if conversion.as_bytes()[kind] == b'p' {
            rest = rest
                .strip_prefix('a')
                .map_or(rest, |rest| rest.strip_prefix('d').unwrap_or(rest));
        }
    }
    assert_eq!(arguments.next(), None, "{format}");
    text.push_str(rest);
    text.trim_end_matches('\n').to_owned()
}

#[test]
fn each_message_of_linux_7_2_is_decoded() {
    let mut shares = BTreeMap::<Family, usize>::new();
    for group in GROUPS {
        let lines: Vec<_> = group
            .messages
            .iter()
            .map(|(format, arguments)| group.head.to_owned() + &print(format, arguments))
            .collect();
        let log = lines.join("\n");
        let mut seen = vec![false; lines.len()];
        let mut faults = 0;
        let mut see = |lines: &[u64]| {
            lines
                .iter()
                .for_each(|line| seen[*line as usize - 1] = true)
        };
        for event in events(&log) {
            match event {
                LogEvent::Fault(fault) => {
                    assert_eq!(fault.family, group.family, "{log}");
                    assert!(
                        !fault.meaning.is_empty() && !fault.source.document.is_empty(),
                        "{log}"
                    );
                    see(&fault.lines);
                    faults += 1;
                }
                LogEvent::Dump(dump) => see(&dump.lines),
                LogEvent::Overflow(note) => see(&[note.line]),
                event => panic!("{event:?}"),
            }
        }
        assert_eq!(
            faults, group.faults,
            "{}, {}:\n{log}",
            group.file, group.function
        );
        assert!(
            seen.iter().all(|seen| *seen),
            "{}, {}: {seen:?}\n{log}",
            group.file,
            group.function
        );
        *shares.entry(group.family).or_default() += group.messages.len();
    }
    for (family, messages) in shares {
        println!("{family}: {messages} of {messages}");
    }
}

#[test]
fn each_function_with_a_limiter_says_how_many_faults_it_kept_back() {
    for (function, family, faults, exact) in [
        ("dmar_fault", Family::Vtd, 3, false),
        ("amd_iommu_report_page_fault", Family::AmdVi, 10, true),
        ("amd_iommu_report_rmp_fault", Family::AmdVi, 10, true),
        ("amd_iommu_report_rmp_hw_error", Family::AmdVi, 10, true),
        ("arm_smmu_dump_event", Family::SmmuV3, 10, true),
        ("arm_smmu_evtq_thread", Family::SmmuV3, 10, true),
        ("arm_smmu_context_fault", Family::SmmuV2, 10, true),
        ("arm_smmu_global_fault", Family::SmmuV2, 10, true),
        ("qcom_smmu_context_fault", Family::SmmuV2, 10, true),
        ("qcom_iommu_fault", Family::Qualcomm, 10, true),
        ("riscv_iommu_fault", Family::Riscv, 10, true),
        ("apple_dart_t8110_irq", Family::Dart, 10, true),
        ("mtk_iommu_isr", Family::MediaTek, 10, true),
        ("viommu_fault_handler", Family::Virtio, 10, true),
    ] {
        let log = format!("{function}: 10 callbacks suppressed");
        let events = events(&log);
        let [LogEvent::Suppressed(suppressed)] = &events[..] else {
            panic!("{log}: {events:?}")
        };
        assert_eq!(
            (suppressed.family, suppressed.faults, suppressed.exact),
            (family, faults, exact)
        );
    }
}

/// Classes of codes, by unit.
#[test]
fn codes_have_their_classes() {
    use Class::{
        AddressWidth, AtsRefused, BadTable, DeviceEntry, InterruptRequest, NoAccess, NotMapped,
        Permission,
    };
    let expected = |table: &codes::CodeTable, class: Class, numbers: &[u32]| {
        for number in numbers {
            let code = table.get(*number).unwrap();
            assert_eq!(
                (code.class, code.certainty),
                (class, Certainty::Certain),
                "{number:#x}"
            );
        }
    };
    let vtd = &codes::VTD;
    expected(vtd, NotMapped, &[0x71]);
    expected(vtd, Permission, &[0x82, 0x85, 0x86]);
    expected(vtd, NoAccess, &[5, 6, 0x79]);
    expected(vtd, BadTable, &[7, 0xc, 0x70, 0x72, 0x78, 0x7a]);
    expected(
        vtd,
        DeviceEntry,
        &[
            1, 2, 3, 8, 9, 0xa, 0xb, 0x38, 0x39, 0x3a, 0x40, 0x41, 0x42, 0x43, 0x50, 0x51, 0x52,
            0x58, 0x59, 0x5a, 0x5b,
        ],
    );
    expected(vtd, AddressWidth, &[4, 0x80]);
    expected(vtd, AtsRefused, &[0xd]);
    expected(
        vtd,
        InterruptRequest,
        &[0x20, 0x21, 0x22, 0x23, 0x24, 0x25, 0x26],
    );
    let smmu = &codes::SMMUV3;
    expected(smmu, NotMapped, &[0x10]);
    expected(smmu, Permission, &[0x13]);
    expected(smmu, BadTable, &[0x0b, 0x11]);
    expected(smmu, DeviceEntry, &[2, 3, 4, 8, 9, 0xa]);
    expected(smmu, AtsRefused, &[5, 7]);
    expected(&codes::SMMU_CONTEXT, NotMapped, &[2]);
    expected(&codes::SMMU_CONTEXT, Permission, &[8]);
    expected(&codes::SMMU_GLOBAL, DeviceEntry, &[2]);
    let riscv = &codes::RISCV;
    expected(riscv, NoAccess, &[12, 13, 15, 20, 21, 23]);
    expected(riscv, DeviceEntry, &[257, 258, 259, 265, 266, 267]);
    for table in [
        vtd,
        smmu,
        riscv,
        &codes::AMDVI,
        &codes::SMMU_CONTEXT,
        &codes::SMMU_GLOBAL,
    ] {
        for (at, code) in table.codes.iter().enumerate() {
            assert!(
                !table.codes[..at]
                    .iter()
                    .any(|other| other.code == code.code),
                "{code:?}"
            );
            assert!(!code.meaning().is_empty());
        }
    }
}
