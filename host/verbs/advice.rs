//! What to do about an errno of a verbs call. The number alone sends people to mailing lists.

use std::io;

use rustix::io::Errno;

/// What was tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Listing devices.
    ListDevices,
    /// Opening a device.
    OpenDevice,
    /// Asking for a port or its addresses.
    QueryPort,
    /// Registering host memory, or GPU memory by its address (nvidia-peermem).
    RegisterAddress,
    /// Registering GPU memory by its dma-buf.
    RegisterDmaBuf,
    /// Making a queue of any kind.
    CreateQueue,
    /// Moving a queue pair to its next state.
    ConnectQueuePair,
}

/// A remedy, where one is known.
pub fn advice(operation: Operation, errno: i32) -> Option<&'static str> {
    let errno = Errno::from_raw_os_error(errno);
    Some(match (operation, errno) {
        (Operation::ListDevices, Errno::NOSYS | Errno::NOENT) => {
            "this kernel has no RDMA: load ib_uverbs and the NIC's driver (mlx5_ib, bnxt_re, efa); in a container, pass \
             /dev/infiniband in (--device=/dev/infiniband)"
        }
        (Operation::OpenDevice, Errno::NOENT | Errno::NODEV) => {
            "its file under /dev/infiniband is missing: in a container, pass /dev/infiniband in (--device=/dev/infiniband)"
        }
        (Operation::OpenDevice | Operation::ListDevices, Errno::ACCESS | Errno::PERM) => {
            "no access to /dev/infiniband/uverbs*: give the user access (group rdma), or start the container with the devices"
        }
        (Operation::QueryPort, _) => {
            "the port does not exist or the driver does not answer: see `rdma link`, FUSELINK_VERBS_PORT"
        }
        (Operation::RegisterAddress | Operation::CreateQueue, Errno::NOMEM) => {
            "raise the limit of locked memory (ulimit -l unlimited; LimitMEMLOCK=infinity in a service; --ulimit memlock=-1 in \
             a container)"
        }
        (Operation::RegisterAddress, Errno::FAULT) => {
            "the address is not host memory: for GPU memory load nvidia-peermem (modprobe nvidia-peermem), or use a kernel and \
             driver with dma-buf (Linux 5.12, open NVIDIA kernel modules)"
        }
        (
            Operation::RegisterDmaBuf,
            Errno::INVAL
            | Errno::OPNOTSUPP
            | Errno::NOSYS
            | Errno::PROTONOSUPPORT
            | Errno::BADF
            | Errno::NOTTY,
        ) => {
            "this device or kernel registers no dma-buf (Linux 5.12, the open NVIDIA kernel modules and a driver that \
             supports it are needed); nvidia-peermem is tried instead"
        }
        (Operation::CreateQueue, Errno::INVAL) => {
            "the device holds no queues of that size: lower FUSELINK_VERBS_SEND_DEPTH or FUSELINK_VERBS_RECV_DEPTH"
        }
        (Operation::ConnectQueuePair, Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH) => {
            "the peer's address does not answer: check routes and ARP between the NICs' interfaces, that both ports are up, and \
             that FUSELINK_VERBS_GID_INDEX names the same network on both servers"
        }
        (Operation::ConnectQueuePair, Errno::INVAL) => {
            "the port, GID index, MTU or service level does not fit the device: see FUSELINK_VERBS_*"
        }
        (Operation::ConnectQueuePair, Errno::NODEV | Errno::NETDOWN) => {
            "the port's network interface is down: ip link set DEVICE up"
        }
        _ => return None,
    })
}

/// An error with its remedy behind it.
pub fn advise(operation: Operation, error: io::Error) -> io::Error {
    match error.raw_os_error().and_then(|errno| advice(operation, errno)) {
        None => error,
        Some(advice) => io::Error::new(error.kind(), format!("{error}; {advice}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn says(operation: Operation, errno: Errno, word: &str) {
        let error = advise(operation, errno.into()).to_string();
        assert!(error.contains(word) && !error.contains('\n'), "{error}");
    }

    #[test]
    fn each_known_failure_names_its_remedy() {
        says(Operation::RegisterAddress, Errno::NOMEM, "ulimit -l");
        says(Operation::CreateQueue, Errno::NOMEM, "ulimit -l");
        says(Operation::RegisterAddress, Errno::FAULT, "nvidia-peermem");
        for refused in [Errno::INVAL, Errno::OPNOTSUPP, Errno::NOSYS, Errno::BADF] {
            says(Operation::RegisterDmaBuf, refused, "peermem");
        }
        says(Operation::ListDevices, Errno::NOSYS, "/dev/infiniband");
        says(Operation::OpenDevice, Errno::NOENT, "--device=/dev/infiniband");
        says(Operation::OpenDevice, Errno::ACCESS, "uverbs");
        says(Operation::ConnectQueuePair, Errno::TIMEDOUT, "ARP");
        says(Operation::ConnectQueuePair, Errno::NETDOWN, "up");
        says(Operation::CreateQueue, Errno::INVAL, "FUSELINK_VERBS_SEND_DEPTH");
    }

    #[test]
    fn what_is_not_known_stays_as_it_is() {
        let error = advise(Operation::RegisterAddress, Errno::IO.into());
        assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
    }
}
