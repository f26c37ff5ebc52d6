package server

import (
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A client that sends and never reads looks alive to keepalive.
func TestAWriteThatTheOtherSideDoesNotTakeEnds(t *testing.T) {
	near, far := net.Pipe()
	defer func() { require.NoError(t, far.Close()) }()
	ended := make(chan struct{})
	c := newConnection(near, 10*time.Millisecond)
	c.until(func() { close(ended) })
	_, err := c.Write([]byte("x"))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, c.Close())
	<-ended
}
