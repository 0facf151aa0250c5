//! Guests' configurations in a log or a file: command lines of QEMU and libvirt's XML, found among other lines.
//! [`inspect`](crate::inspect) reads them.

use crate::inspect::{Guest, libvirt_rough, qemu_rough};
pub(in crate::explain) use crate::inspect::{begins, logged as qemu_words};

/// The longest line or document that is read.
pub(in crate::explain) const MOST_TEXT: usize = 10 << 20;
/// Pages of a pool whose size is not on the line (x86-64).
const DEFAULT_POOL: u64 = 2 << 20;

/// The guest of a command line's arguments.
pub(in crate::explain) fn qemu(arguments: &[String]) -> Guest {
    let mut guest = qemu_rough(arguments, DEFAULT_POOL);
    guest.name_pools(DEFAULT_POOL);
    guest
}

/// The guest of a `<domain>`; `None` where the XML is damaged or another one.
pub(in crate::explain) fn libvirt(text: &str) -> Option<Guest> {
    libvirt_rough(text, DEFAULT_POOL).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::{BusPlace, Interface};

    fn of_line(line: &str) -> Guest {
        qemu(&qemu_words(line).unwrap())
    }

    #[test]
    fn lines_have_memory_devices_and_buses() {
        let new = of_line(
            "sudo qemu-system-x86_64 -machine pc-q35-6.2 -m 4G -object memory-backend-memfd,id=a,size=2G,hugetlb=on,\
             hugetlbsize=1G,prealloc=on,host-nodes=1,policy=bind -object memory-backend-ram,id=b,size=2G \
             -numa node,memdev=a -numa node,memdev=b -device pxb-pcie,id=x,bus_nr=32,numa_node=1 \
             -device pcie-root-port,id=rp,bus=x -device vfio-pci,host=01:00.0,bus=rp -device vfio-pci,host=02:00.0 \
             -device intel-iommu",
        );
        assert_eq!(new.bytes(), 4 << 30);
        assert_eq!(new.machine_version, Some((6, 2)));
        assert_eq!(
            (new.memory[0].host_nodes.as_slice(), new.memory[0].bound),
            (&[1][..], true)
        );
        assert_eq!(new.memory[0].pool_bytes, Some(1 << 30));
        assert_eq!(new.devices[0].place, BusPlace::Expander);
        assert_eq!(new.devices[1].place, BusPlace::Root);
        assert_eq!(new.viommu.as_deref(), Some("intel-iommu"));
        assert_eq!(new.interface, Some(Interface::Type1));
    }

    #[test]
    fn domains_have_cells_nodes_and_places() {
        let new = libvirt(
            "<domain type='kvm'><memory unit='GiB'>8</memory><cpu><numa><cell id='0' memory='4' unit='GiB'/>\
             <cell id='1' memory='4' unit='GiB'/></numa></cpu><numatune><memnode cellid='1' mode='strict' nodeset='1'/>\
             </numatune><devices><controller type='pci' index='0' model='pcie-root'/>\
             <controller type='pci' index='1' model='pcie-expander-bus'><target busNr='254'><node>1</node></target></controller>\
             <controller type='pci' index='2' model='pcie-root-port'><address type='pci' bus='0x01'/></controller>\
             <hostdev mode='subsystem' type='pci'><source><address domain='0' bus='0x41' slot='0' function='0'/></source>\
             <address type='pci' bus='0x02'/></hostdev><hostdev mode='subsystem' type='pci'><source>\
             <address domain='0' bus='0x61' slot='0' function='0'/></source></hostdev><iommu model='intel'/></devices></domain>",
        )
        .unwrap();
        assert_eq!((new.bytes(), new.nodes), (8 << 30, 2));
        assert_eq!(new.memory[1].host_nodes, [1]);
        assert!(new.memory[0].host_nodes.is_empty());
        assert_eq!(new.devices[0].place, BusPlace::Expander);
        assert_eq!(new.devices[1].place, BusPlace::Root);
        assert_eq!(new.viommu.as_deref(), Some("intel"));
    }

    #[test]
    fn files_and_variables_that_were_not_given_are_named() {
        assert_eq!(
            of_line("kvm -readconfig /etc/a.cfg -m ${MEM}").unread,
            ["/etc/a.cfg", "${MEM}"]
        );
        let new = libvirt("<domain><memory>VM_MEM</memory></domain>").unwrap();
        assert_eq!(new.unread, ["VM_MEM"]);
        assert_eq!(libvirt("<network/>"), None);
        assert_eq!(libvirt("<domain><memory>"), None);
    }
}
