//! Names that QEMU has: options with and without a value, memory objects and their properties, and what keeps memory
//! from the host.

pub(super) const BACKENDS: &str = "memory-backend-ram, memory-backend-memfd, memory-backend-file, memory-backend-shm, \
    memory-backend-memfd-private, memory-backend-guest-memfd";

/// Properties of memory objects that do not change the estimate.
pub(super) const NEUTRAL: [&str; 15] = [
    "align",
    "discard-data",
    "dump",
    "id",
    "merge",
    "offset",
    "pmem",
    "policy",
    "prealloc-context",
    "qom-type",
    "readonly",
    "reserve",
    "rom",
    "seal",
    "x-use-canonical-path-for-ramblock-id",
];

/// Options without a value that decide nothing here, of QEMU 5 to 10 (`qemu-options.hx`).
pub(super) const FLAGS: &str = "alt-grab async-teardown ctrl-grab curses daemonize enable-fips enable-kvm \
    enable-sync-profile full-screen h help jitdump mem-prealloc no-acpi no-fd-bootchk no-frame no-hpet \
    no-quit no-reboot no-shutdown no-user-config nodefaults nodefconfig nographic old-param \
    only-migratable perfmap portrait preconfig S s semihosting show-cursor singlestep snapshot usb \
    version win2k-hack xen-attach xen-domid-restrict";

/// Options with a value.
pub(super) const VALUED: &str = "accel acpitable action add-fd append audio audiodev balloon bios blockdev \
    boot cdrom chardev chroot compat cpu D d debugcon device dfilter display drive dtb dump-vmstate echr \
    fda fdb fsdev fw_cfg g gdb global hda hdb hdc hdd icount incoming initrd iscsi k kernel L loadvm M m \
    machine mem-path mon monitor msg mtdblock name net netdev nic numa object option-rom overcommit \
    parallel pflash pidfile plugin prom-env qmp qmp-pretty qtest qtest-log readconfig realtime rotate rtc \
    run-with runas sandbox sd seed semihosting-config serial set shim smbios smp soundhw spice tb-size \
    tpmdev trace usbdevice uuid vga virtfs vnc watchdog watchdog-action writeconfig xen-domid";

/// Options without a value that older versions had, of QEMU before 5 and of qemu-kvm.
pub(super) const REMOVED_FLAGS: &str = "audio-help cirrusvga defconfig enable-kqemu enable-nesting igd-passthru kernel-kqemu \
    localtime no-kqemu no-kvm no-kvm-irqchip no-kvm-pit no-kvm-pit-reinjection no-rtc rtc-td-hack sdl std-vga \
    tdf trace-unassigned virtfs_synth vmwarevga xen-create";

/// Options with a value that they had, and `-id` of Proxmox.
pub(super) const REMOVED_VALUED: &str = "bootp bt clock cpu_vendor hdachs id kvm-shadow-memory nvram osk pcidevice redir smb \
    startdate tftp virtioconsole";

/// Beginnings of the parts of names of options that may decide about memory or devices.
pub(super) const DECISIVE: [&str; 7] = ["dev", "huge", "mem", "numa", "object", "ram", "vfio"];

/// Objects that keep a guest's memory from the host, and what they are called.
pub(super) const CONFIDENTIAL: [(&str, &str); 6] = [
    ("pef-guest", "PEF"),
    ("rme-guest", "Arm CCA"),
    ("s390-pv-guest", "s390-pv"),
    ("sev-guest", "SEV"),
    ("sev-snp-guest", "SEV-SNP"),
    ("tdx-guest", "TDX"),
];
