package badlink

import (
	"fmt"
	"net/netip"

	"github.com/samber/lo"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Connections returns the number of connections across the link that its servers hold, alive or
// not.
func (l *Link) Connections() (int, error) {
	const established = 1
	sockets, err := netlink.SocketDiagTCP(unix.AF_INET)
	if err != nil {
		return 0, fmt.Errorf("listing sockets: %w", err)
	}
	return lo.CountBy(sockets, func(s *netlink.Socket) bool {
		peer, ok := netip.AddrFromSlice(s.ID.Destination)
		return ok && s.State == established && clients.Contains(peer.Unmap())
	}), nil
}
