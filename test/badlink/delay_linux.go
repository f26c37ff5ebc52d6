package badlink

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	mtu = 1500
	// inFlight is the maximum number of packets in flight. Further packets are lost, as in a router
	// with a full queue.
	inFlight = 8192
)

// delay is a tun device that returns each packet routed to it, unchanged and in order, after some
// time.
type delay struct {
	device  *os.File
	each    atomic.Int64 // nanoseconds
	packets chan packet
	stop    chan struct{}
	running sync.WaitGroup
	// err is what ended the device early. Guarded by running.
	err error
}

type packet struct {
	due  time.Time
	data []byte
}

// newDelay creates the device in the network namespace of the calling thread.
func newDelay(name string) (*delay, error) {
	const tun = "/dev/net/tun"
	fd, err := unix.Open(tun, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", tun, err)
	}
	request, err := unix.NewIfreq(name)
	if err == nil {
		request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("making a tun device: %w", err)
	}
	d := &delay{device: os.NewFile(uintptr(fd), tun), packets: make(chan packet, inFlight), stop: make(chan struct{})}
	d.running.Go(d.take)
	d.running.Go(d.deliver)
	return d, nil
}

// set changes the delay of new packets. Packets in flight are not affected, and are not overtaken.
func (d *delay) set(each time.Duration) { d.each.Store(int64(each)) }

// close removes the device, and also returns the error that ended it early, if any.
func (d *delay) close() error {
	close(d.stop)
	err := d.device.Close()
	d.running.Wait()
	return errors.Join(d.err, err)
}

func (d *delay) take() {
	for {
		data := make([]byte, mtu)
		n, err := d.device.Read(data)
		switch {
		case errors.Is(err, os.ErrClosed):
			return
		case err != nil:
			d.err = fmt.Errorf("reading packets: %w", err)
			return
		}
		select {
		case d.packets <- packet{due: time.Now().Add(time.Duration(d.each.Load())), data: data[:n]}:
		default:
		}
	}
}

func (d *delay) deliver() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		var p packet
		select {
		case p = <-d.packets:
		case <-d.stop:
			return
		}
		if left := time.Until(p.due); left > 0 {
			timer.Reset(left)
			select {
			case <-timer.C:
			case <-d.stop:
				return
			}
		}
		// The kernel rejects a packet that it cannot use, which is then lost.
		_, _ = d.device.Write(p.data)
	}
}
