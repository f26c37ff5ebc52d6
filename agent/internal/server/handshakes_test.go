package server_test

import (
	"crypto/tls"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/testpki"
)

func TestHandshakesThatFailAreCountedByReason(t *testing.T) {
	f := start(t)
	other := testpki.New(t)
	certificate := func(authority *testpki.Authority, life time.Duration) []tls.Certificate {
		files := authority.IssueFor(t, life, t.TempDir(), f.authority, "spiffe://karpenter-capi/cluster/fleet/spoke")
		pair, err := tls.LoadX509KeyPair(files.CertFile, files.KeyFile)
		require.NoError(t, err)
		return []tls.Certificate{pair}
	}
	connect := func(config *tls.Config) {
		config.MinVersion, config.NextProtos, config.ServerName = tls.VersionTLS13, []string{"h2"}, "127.0.0.1"
		conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", f.address)
		require.NoError(t, err)
		secured := tls.Client(conn, config)
		if secured.HandshakeContext(t.Context()) == nil {
			// The client learns of the refusal with its first read.
			_, err = secured.Read(make([]byte, 1))
			require.Error(t, err)
		}
		require.NoError(t, conn.Close())
	}
	for reason, try := range map[string]func(){
		"no_certificate": func() { connect(&tls.Config{RootCAs: f.authority.Pool()}) },
		"expired": func() {
			connect(&tls.Config{RootCAs: f.authority.Pool(), Certificates: certificate(f.authority, -time.Second)})
		},
		"unknown_issuer": func() { connect(&tls.Config{RootCAs: f.authority.Pool(), Certificates: certificate(other, time.Hour)}) },
		"refused_by_client": func() {
			connect(&tls.Config{RootCAs: other.Pool(), Certificates: certificate(f.authority, time.Hour)})
		},
		"no_tls": func() {
			conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", f.address)
			require.NoError(t, err)
			_, err = conn.Write([]byte("GET / HTTP/1.1\r\nHost: agent\r\n\r\n"))
			require.NoError(t, err)
			_, err = conn.Read(make([]byte, 1))
			require.Error(t, err)
			require.NoError(t, conn.Close())
		},
		"broken_off": func() {
			conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", f.address)
			require.NoError(t, err)
			require.NoError(t, conn.Close())
		},
	} {
		t.Run(reason, func(t *testing.T) {
			try()
			require.Eventually(t, func() bool {
				families, err := f.registry.Gather()
				require.NoError(t, err)
				for _, family := range families {
					for _, m := range family.GetMetric() {
						if family.GetName() == "capi_agent_tls_handshake_errors_total" && m.GetLabel()[0].GetValue() == reason {
							return m.GetCounter().GetValue() == 1
						}
					}
				}
				return false
			}, patience, time.Millisecond)
		})
	}
}
