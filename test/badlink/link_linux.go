package badlink

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Port is the port of every address of a link.
const Port = 7443

// Devices in the namespace between. Their peers here have the prefix.
const (
	near   = "near"
	far    = "far"
	behind = "delay"

	prefix = "badlink-"
)

// Addresses.
var (
	nearHere    = netip.MustParsePrefix("10.77.1.1/24")
	nearBetween = netip.MustParsePrefix("10.77.1.2/24")
	farHere     = netip.MustParsePrefix("10.77.2.1/24")
	farBetween  = netip.MustParsePrefix("10.77.2.2/24")
	// servers are the link's addresses, and clients is the address that servers see for all
	// clients.
	servers = netip.MustParsePrefix("10.77.3.0/24")
	clients = netip.MustParsePrefix("10.77.4.0/24")
)

// Conditions are the properties of a link. The zero value is a good link.
type Conditions struct {
	// RTT is the round-trip time.
	RTT time.Duration
	// Loss is the percentage of packets lost in each direction.
	Loss float64
	// Rate is the bandwidth in bits per second in each direction. Zero means unlimited.
	Rate uint64
	// Mute drops everything that clients send, and Deaf everything that servers send.
	Mute, Deaf bool
}

// Down is a link that passes nothing.
var Down = Conditions{Mute: true, Deaf: true}

// Link is a network from this machine to itself. Only one may exist at a time. Its methods are safe
// for concurrent use.
type Link struct {
	between netns.NsHandle
	routes  *netlink.Handle // of the namespace between
	delay   *delay

	mu         sync.Mutex
	conditions Conditions
	ports      []uint16            // of the servers, in the order of their addresses
	lost       map[netip.Addr]bool // addresses that are no longer reachable
	generation uint32              // of connections, starting at one; connections of earlier generations are forgotten
	dropped    uint64              // packets dropped by rules that have been replaced
}

// New creates a good link. The program must have called [Apart].
func New() (*Link, error) {
	l := &Link{between: netns.None(), lost: map[netip.Addr]bool{}, generation: 1}
	if err := l.make(); err != nil {
		return nil, errors.Join(fmt.Errorf("making a link: %w", err), l.Close())
	}
	return l, nil
}

func (l *Link) make() error {
	if err := l.makeBetween(); err != nil {
		return err
	}
	var err error
	if l.routes, err = netlink.NewHandleAt(l.between); err != nil {
		return err
	}
	here, err := netlink.NewHandle()
	if err != nil {
		return err
	}
	defer here.Close()
	for _, pair := range []struct {
		name          string
		here, between netip.Prefix
	}{{near, nearHere, nearBetween}, {far, farHere, farBetween}} {
		veth := netlink.NewVeth(netlink.LinkAttrs{Name: prefix + pair.name, MTU: mtu})
		veth.PeerName, veth.PeerNamespace, veth.PeerMTU = pair.name, netlink.NsFd(l.between), mtu
		if err := here.LinkAdd(veth); err != nil {
			return fmt.Errorf("making a veth pair: %w", err)
		}
		if err := errors.Join(bringUp(here, prefix+pair.name, pair.here), bringUp(l.routes, pair.name, pair.between)); err != nil {
			return err
		}
	}
	if err := bringUp(l.routes, behind, netip.Prefix{}); err != nil {
		return err
	}
	// Requests leave through near and arrive through far; answers take the opposite way.
	err = errors.Join(
		route(here, prefix+near, servers, nearBetween.Addr()), route(here, prefix+far, clients, farBetween.Addr()),
		route(l.routes, far, servers, farHere.Addr()), route(l.routes, near, clients, nearHere.Addr()),
		l.detour(),
		// An answer comes from 127.0.0.1 before it is translated.
		setting("ipv4/conf/"+prefix+far+"/route_localnet", "1"),
	)
	if err != nil {
		return err
	}
	if err := l.translate(); err != nil { // makes the kernel load the required modules
		return err
	}
	// A connection that lost packets is still tracked as a connection.
	if err := setting("netfilter/nf_conntrack_tcp_be_liberal", "1"); err != nil {
		return err
	}
	// When the chain is replaced, its packets are counted, so there must be one.
	if err := replaceRules(int(l.between), chain{name: dropping}); err != nil {
		return err
	}
	return l.restrict()
}

// makeBetween creates the namespace and its delay device. The calling thread enters the namespace
// and returns.
func (l *Link) makeBetween() (err error) {
	runtime.LockOSThread()
	here, err := netns.Get()
	if err != nil {
		return err
	}
	defer func() {
		back := netns.Set(here)
		if back == nil {
			runtime.UnlockOSThread() // otherwise no other goroutine may use this thread
		}
		err = errors.Join(err, back, here.Close())
	}()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("making a network namespace: %w", err)
	}
	if l.between, err = netns.Get(); err != nil {
		return err
	}
	if l.delay, err = newDelay(behind); err != nil {
		return err
	}
	return errors.Join(
		setting("ipv4/ip_forward", "1"),
		// Packets return from the delay through a device that is not on the route to their source.
		setting("ipv4/conf/all/rp_filter", "0"), setting("ipv4/conf/default/rp_filter", "0"), setting("ipv4/conf/"+behind+"/rp_filter", "0"),
	)
}

// setting sets a kernel parameter in the calling thread's network namespace.
func setting(name, value string) error {
	return os.WriteFile(filepath.Join("/proc/sys/net", name), []byte(value), 0) // the file must already exist
}

func bringUp(in *netlink.Handle, device string, address netip.Prefix) error {
	d, err := in.LinkByName(device)
	if err != nil {
		return fmt.Errorf("device %s: %w", device, err)
	}
	if address.IsValid() {
		if err := in.AddrAdd(d, &netlink.Addr{IPNet: ipNet(address)}); err != nil {
			return fmt.Errorf("address %s: %w", address, err)
		}
	}
	if err := in.LinkSetUp(d); err != nil {
		return fmt.Errorf("device %s: %w", device, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func route(in *netlink.Handle, device string, to netip.Prefix, via netip.Addr) error {
	d, err := in.LinkByName(device)
	if err != nil {
		return fmt.Errorf("device %s: %w", device, err)
	}
	if err := in.RouteAdd(&netlink.Route{LinkIndex: d.Attrs().Index, Dst: ipNet(to), Gw: via.AsSlice()}); err != nil {
		return fmt.Errorf("route to %s: %w", to, err)
	}
	return nil
}

// detour routes what arrives in between through the delay device.
func (l *Link) detour() error {
	const table, priority = 100, 100
	d, err := l.routes.LinkByName(behind)
	if err != nil {
		return fmt.Errorf("device %s: %w", behind, err)
	}
	if err := l.routes.RouteAdd(&netlink.Route{
		LinkIndex: d.Attrs().Index, Table: table, Dst: ipNet(netip.MustParsePrefix("0.0.0.0/0")), Scope: netlink.SCOPE_LINK,
	}); err != nil {
		return fmt.Errorf("route to the delay: %w", err)
	}
	for _, device := range []string{near, far} {
		rule := netlink.NewRule()
		rule.IifName, rule.Table, rule.Priority = device, table, priority
		if err := l.routes.RuleAdd(rule); err != nil {
			return fmt.Errorf("rule for the delay: %w", err)
		}
	}
	return nil
}

// Close removes the link. Connections across it hang.
func (l *Link) Close() error {
	var errs []error
	if l.delay != nil {
		errs = append(errs, l.delay.close())
	}
	if l.routes != nil {
		// The devices' peers are removed with them, and the rest with the namespace.
		for _, device := range []string{near, far} {
			if d, err := l.routes.LinkByName(device); err == nil {
				errs = append(errs, l.routes.LinkDel(d))
			}
		}
		l.routes.Close()
	}
	if l.between.IsOpen() {
		errs = append(errs, l.between.Close())
		errs = append(errs, replaceRules(0))
	}
	return errors.Join(errs...)
}

// Serve returns an address that leads, on [Port], across the link to a port of 127.0.0.1. Each call
// returns a different address.
func (l *Link) Serve(port uint16) (netip.Addr, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ports = append(l.ports, port)
	return addressOf(len(l.ports) - 1), l.translate()
}

func addressOf(server int) netip.Addr {
	address := servers.Addr().As4()
	address[3] = byte(server + 1)
	return netip.AddrFrom4(address)
}

// Set changes the link's conditions. Packets in flight are not affected.
func (l *Link) Set(c Conditions) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conditions = c
	return l.restrict()
}

// Forget drops all further packets of existing connections, like a gateway that has lost its
// connection table. Neither end is notified.
func (l *Link) Forget() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.generation++
	return l.restrict()
}

// Lose makes an address unreachable, in both directions.
func (l *Link) Lose(address netip.Addr) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost[address] = true
	return l.restrict()
}

// translate sets the address translations here. The caller must hold the lock.
func (l *Link) translate() error {
	requests := chain{name: "requests", kind: nftables.ChainTypeNAT, hook: nftables.ChainHookPrerouting, priority: nftables.ChainPriorityNATDest}
	for i, port := range l.ports {
		requests.rules = append(requests.rules, when(arrivesBy(prefix+far), isTo(addressOf(i)), isToPort(Port)).
			then(sendTo(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port))...))
	}
	sources := chain{
		name: "sources", kind: nftables.ChainTypeNAT, hook: nftables.ChainHookPostrouting, priority: nftables.ChainPriorityNATSource,
		rules: []rule{when(leavesBy(prefix + near)).then(comeFrom(clients.Addr().Next())...)},
	}
	if err := replaceRules(0, requests, sources); err != nil {
		return fmt.Errorf("translating addresses: %w", err)
	}
	return nil
}

// restrict applies the link's conditions. The caller must hold the lock.
func (l *Link) restrict() error {
	c := l.conditions
	var err error
	if l.dropped, err = l.lostSoFar(); err != nil { // replacing the rules resets their counters
		return err
	}
	l.delay.set(c.RTT / 2)
	forgotten := chain{
		name: "generation", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookPrerouting, priority: nftables.ChainPriorityMangle,
		rules: []rule{when(isMarked(0)).then(markWith(l.generation)...)},
	}
	drops := chain{name: dropping, kind: nftables.ChainTypeFilter, hook: nftables.ChainHookForward, priority: nftables.ChainPriorityFilter}
	add := func(r rule) { drops.rules = append(drops.rules, r.countAndDrop()) }
	for mark := uint32(1); mark < l.generation; mark++ {
		add(when(isMarked(mark)))
	}
	for address := range l.lost {
		add(when(isTo(address)))
		add(when(isFrom(address)))
	}
	for _, direction := range []struct {
		by     string
		closed bool
	}{{far, c.Mute}, {near, c.Deaf}} {
		if direction.closed {
			add(when(arrivesBy(behind), leavesBy(direction.by)))
		}
		if c.Loss > 0 {
			add(when(arrivesBy(behind), leavesBy(direction.by), byChance(c.Loss)))
		}
	}
	if err := replaceRules(int(l.between), forgotten, drops); err != nil {
		return fmt.Errorf("dropping packets: %w", err)
	}
	return errors.Join(l.limit(near), l.limit(far))
}

// dropping is the chain of the rules that drop packets.
const dropping = "drops"

// Lost returns the number of packets dropped since the link was created, by chance or because
// nothing was to pass. It does not count packets that found a full queue.
func (l *Link) Lost() (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	lost, err := l.lostSoFar()
	return int(lost), err
}

// lostSoFar returns the number of dropped packets. The caller must hold the lock.
func (l *Link) lostSoFar() (uint64, error) {
	more, err := counted(int(l.between), dropping)
	return l.dropped + more, err
}

// limit sets the rate of a device. The caller must hold the lock.
func (l *Link) limit(device string) error {
	const (
		// burst is the number of bytes that may pass at once after a silence, and queue is how long
		// a packet may wait before it is lost.
		burst = 4 * mtu
		queue = 400 * time.Millisecond
	)
	d, err := l.routes.LinkByName(device)
	if err != nil {
		return fmt.Errorf("device %s: %w", device, err)
	}
	present, err := l.routes.QdiscList(d)
	if err != nil {
		return fmt.Errorf("limiting the rate of %s: %w", device, err)
	}
	for _, q := range present {
		if _, limited := q.(*netlink.Tbf); !limited {
			continue
		}
		if err := l.routes.QdiscDel(q); err != nil {
			return fmt.Errorf("lifting the limit of %s: %w", device, err)
		}
	}
	if l.conditions.Rate == 0 {
		return nil
	}
	bytes := l.conditions.Rate / 8
	err = l.routes.QdiscAdd(&netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: d.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		Rate:       bytes, Buffer: netlink.Xmittime(bytes, burst), Limit: burst + uint32(float64(bytes)*queue.Seconds()),
	})
	if err != nil {
		return fmt.Errorf("limiting the rate of %s: %w", device, err)
	}
	return nil
}
