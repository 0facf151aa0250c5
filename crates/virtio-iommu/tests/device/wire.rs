//! Bytes on the wire, written down by hand from VIRTIO 1.3, 5.13.

use virtio_iommu::wire::{Malformed, Request};
use virtio_iommu::{
    ConfigError, FaultReport, ReportReason, ReservedKind, ReservedMemory, features,
};

use crate::guest::{ENDPOINTS, Guest, PROBE_BYTES, config, status};

const LE1: [u8; 4] = [1, 0, 0, 0];

#[test]
fn the_configuration_space_byte_by_byte() {
    let mut guest = Guest::new();
    let mut bytes = [0xff; 44];
    guest.device.read_config(0, &mut bytes);
    let mut expected = Vec::new();
    expected.extend([0, 0xf0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]); // page_size_mask
    expected.extend([0; 8]); // input_range.start
    expected.extend([0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0]); // input_range.end
    expected.extend([0, 0, 0, 0, 99, 0, 0, 0]); // domain_range
    expected.extend([64, 0, 0, 0]); // probe_size
    expected.extend([0; 4]); // bypass, reserved
    expected.extend([0; 4]); // behind the end
    assert_eq!(bytes.as_slice(), expected);
    // Any part of it.
    guest.device.write_config(36, &[1]);
    let mut part = [0xff; 3];
    guest.device.read_config(35, &mut part);
    assert_eq!(part, [0, 1, 0]);
    guest.device.read_config(u64::MAX, &mut part);
    assert_eq!(part, [0; 3]);
}

#[test]
fn features_follow_the_configuration_and_superseded_bypass_is_never_offered() {
    let all = 0b111_0111;
    assert_eq!(config().features(), all);
    let mut least = config();
    (least.input, least.domains, least.bypass) = (None, None, None);
    (least.probe_bytes, least.mmio) = (0, false);
    assert_eq!(least.features(), features::MAP_UNMAP);
    let mut guest = Guest::new();
    let refused = guest
        .device
        .ack_features(features::BYPASS | features::MAP_UNMAP);
    assert_eq!(refused.unwrap_err().features, features::BYPASS);
    assert_eq!(guest.device.negotiated(), None);
    // Features of rings and transport are not the device's: VERSION_1 and EVENT_IDX.
    let transport = 1 << 32 | 1 << 29;
    assert_eq!(guest.device.ack_features(all | transport), Ok(()));
    assert_eq!(guest.device.negotiated(), Some(all));
}

#[test]
fn a_mask_without_page_sizes_is_no_configuration() {
    let mut config = config();
    config.page_sizes = 0;
    assert_eq!(
        crate::guest::try_device(config).unwrap_err(),
        ConfigError::PageSizes
    );
}

#[test]
fn requests_byte_by_byte() {
    let mut guest = Guest::new();
    // ATTACH of endpoint 8 to domain 1: type, reserved bytes that are ignored, domain, endpoint, flags,
    // reserved.
    let attach = [[1, 9, 9, 9], LE1, [8, 0, 0, 0], [0; 4], [0; 4]].concat();
    assert_eq!(guest.send_bytes(&attach, 4), [0; 4]);
    assert_eq!(guest.device.domain_of(8), Some(1));
    // MAP of 0x12000 to 0x13fff, to the guest's 0x3000, for reading.
    let mut map = [[3, 9, 9, 9], LE1].concat();
    map.extend(0x1_2000u64.to_le_bytes());
    map.extend(0x1_3fffu64.to_le_bytes());
    map.extend(0x3000u64.to_le_bytes());
    map.extend(LE1);
    assert_eq!((map.len(), guest.send_bytes(&map, 4)), (36, vec![0; 4]));
    assert_eq!(guest.read(8, 0x1_3ff8), Some(0x4ff8));
    // UNMAP of the same.
    let mut unmap = [[4, 0, 0, 0], LE1].concat();
    unmap.extend(0x1_2000u64.to_le_bytes());
    unmap.extend(0x1_3fffu64.to_le_bytes());
    unmap.extend([0; 4]);
    assert_eq!((unmap.len(), guest.send_bytes(&unmap, 4)), (28, vec![0; 4]));
    assert_eq!(guest.read(8, 0x1_3ff8), None);
    // DETACH, with reserved bytes that are ignored.
    let detach = [[2, 0, 0, 0], LE1, [8, 0, 0, 0], [7; 4], [7; 4]].concat();
    assert_eq!(guest.send_bytes(&detach, 4), [0; 4]);
    assert_eq!(guest.device.domain_of(8), None);
    guest.assert_all_back();
}

#[test]
fn properties_byte_by_byte() {
    let mut guest = Guest::new();
    let mut probe = vec![5, 0, 0, 0, 8, 0, 0, 0];
    probe.resize(72, 0xaa);
    let answer = guest.send_bytes(&probe, PROBE_BYTES + 4);
    // RESV_MEM (1), 20 bytes, MSI (1); zeros behind the last property.
    let mut expected = vec![1, 0, 20, 0, 1, 0, 0, 0];
    expected.extend(0xfee0_0000u64.to_le_bytes());
    expected.extend(0xfeef_ffffu64.to_le_bytes());
    expected.resize(PROBE_BYTES as usize + 4, 0);
    assert_eq!(answer, expected);
    // Nothing is reserved for the next, and a page for the last.
    probe[4] = ENDPOINTS[1] as u8;
    assert_eq!(guest.send_bytes(&probe, PROBE_BYTES + 4), [0; 68]);
    probe[4] = ENDPOINTS[2] as u8;
    let answer = guest.send_bytes(&probe, PROBE_BYTES + 4);
    assert_eq!(answer[..8], [1, 0, 20, 0, 0, 0, 0, 0]);
    assert_eq!(
        answer[8..24],
        [[0, 0x50, 0, 0, 0, 0, 0, 0], [0xff, 0x5f, 0, 0, 0, 0, 0, 0]].concat()
    );
    assert!(status(&answer).is_some() && answer[24..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_property_begins_where_the_one_before_it_ends() {
    let mut config = config();
    config.endpoints[0].reserved.push(ReservedMemory {
        kind: ReservedKind::Reserved,
        range: 0x1000..=0x2fff,
    });
    let mut guest = Guest::with(config, iopt::FormatId::VtdSs);
    let mut probe = vec![5, 0, 0, 0, ENDPOINTS[0] as u8];
    probe.resize(72, 0);
    let answer = guest.send_bytes(&probe, PROBE_BYTES + 4);
    let mut expected = vec![1, 0, 20, 0, 0, 0, 0, 0];
    expected.extend(0x1000u64.to_le_bytes());
    expected.extend(0x2fffu64.to_le_bytes());
    expected.extend([1, 0, 20, 0, 1, 0, 0, 0]);
    expected.extend(0xfee0_0000u64.to_le_bytes());
    expected.extend(0xfeef_ffffu64.to_le_bytes());
    expected.resize(PROBE_BYTES as usize + 4, 0);
    assert_eq!(answer, expected);
}

#[test]
fn a_fault_byte_by_byte() {
    let mut fault = FaultReport {
        reason: ReportReason::Mapping,
        endpoint: 0x0102,
        access: Some(iopt::walk::Access::Write),
        address: Some(0x1122_3344_5566_7788),
    };
    let expected = [
        [2, 0, 0, 0, 2, 1, 0, 0],
        [2, 1, 0, 0, 0, 0, 0, 0],
        [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11],
    ];
    assert_eq!(fault.to_bytes().as_slice(), expected.concat());
    (fault.reason, fault.access) = (ReportReason::Domain, Some(iopt::walk::Access::Read));
    assert_eq!(fault.to_bytes()[..8], [1, 0, 0, 0, 1, 1, 0, 0]);
    (fault.access, fault.address) = (None, None);
    assert_eq!(fault.to_bytes()[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(fault.to_bytes()[16..], [0; 8]);
}

#[test]
fn only_whole_requests_are_requests() {
    let lengths = [(1u8, 20), (2, 20), (3, 36), (4, 28), (5, 72)];
    for (kind, whole) in lengths {
        for bytes in 0..=80 {
            let mut data = vec![0; bytes];
            data.iter_mut().take(1).for_each(|byte| *byte = kind);
            let expected = match bytes {
                0..4 => Some(Malformed::Head { bytes }),
                _ if bytes == whole => None,
                _ => Some(Malformed::Length { kind, bytes }),
            };
            assert_eq!(Request::decode(&data).err(), expected, "{kind}, {bytes}");
        }
    }
    assert_eq!(Request::decode(&[0; 20]), Err(Malformed::Type { kind: 0 }));
    assert_eq!(Request::decode(&[6; 20]), Err(Malformed::Type { kind: 6 }));
}
