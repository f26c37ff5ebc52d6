package client_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
)

func TestOptionsThatCannotWorkAreRefused(t *testing.T) {
	files := &client.TLS{CertFile: "/tls/tls.crt", KeyFile: "/tls/tls.key", CAFile: "/tls/ca.crt"}
	held := certificates.NewHeld(nil)
	for name, c := range map[string]struct {
		options client.Options
		says    string
	}{
		"no address":                    {client.Options{TLS: files}, "no agent address"},
		"network without TLS":           {client.Options{Address: "agent.example:8443"}, "needs TLS"},
		"loopback without being asked":  {client.Options{Address: "127.0.0.1:8443"}, "needs TLS"},
		"plaintext over the network":    {client.Options{Address: "10.0.0.1:8443", PlaintextLoopback: true}, "only for loopback"},
		"plaintext to a name":           {client.Options{Address: "dns:///agent:8443", PlaintextLoopback: true}, "only for loopback"},
		"plaintext to a lookalike":      {client.Options{Address: "127.0.0.1.example:8443", PlaintextLoopback: true}, "only for loopback"},
		"plaintext by another resolver": {client.Options{Address: "dns://10.0.0.1/localhost:8443", PlaintextLoopback: true}, "only for loopback"},
		"plaintext and TLS":             {client.Options{Address: "127.0.0.1:8443", PlaintextLoopback: true, TLS: files}, "TLS is set"},
		"unix socket and TLS":           {client.Options{Address: "unix:///run/agent.sock", TLS: files}, "unix socket"},
		"no key":                        {client.Options{Address: "agent:8443", TLS: &client.TLS{CertFile: "a", CAFile: "b"}}, "missing: key"},
		"files and a source": {
			client.Options{Address: "agent:8443", TLS: &client.TLS{CertFile: "c", KeyFile: "k", CAFile: "ca", Source: held}}, "either a source or files",
		},
		"a file beside a source":     {client.Options{Address: "agent:8443", TLS: &client.TLS{CAFile: "ca", Source: held}}, "either a source or files"},
		"neither files nor a source": {client.Options{Address: "agent:8443", TLS: &client.TLS{ServerName: "agent"}}, "missing: CA, certificate, key"},
		"a unix socket and a source": {client.Options{Address: "unix:///run/agent.sock", TLS: &client.TLS{Source: held}}, "unix socket"},
		"a negative refresh": {
			client.Options{Address: "agent:8443", TLS: &client.TLS{CertFile: "c", KeyFile: "k", CAFile: "ca", Refresh: -1}}, "refresh",
		},
		"a negative heartbeat interval": {client.Options{Address: "unix:///run/agent.sock", HeartbeatInterval: -1}, "heartbeat"},
		"a unix socket of another host": {client.Options{Address: "unix://host/agent.sock"}, "write unix:///"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := client.New(c.options)
			require.ErrorContains(t, err, c.says)
		})
	}
}

func TestOptionsThatCanWorkNeedNoAgent(t *testing.T) {
	for name, options := range map[string]client.Options{
		"TLS with files still to come": {
			Address: "agent.example:8443",
			TLS:     &client.TLS{CertFile: "/nowhere/tls.crt", KeyFile: "/nowhere/tls.key", CAFile: "/elsewhere/ca.crt"},
		},
		"TLS with a source that holds nothing yet": {Address: "agent.example:8443", TLS: &client.TLS{Source: certificates.NewHeld(nil)}},

		"unix socket":        {Address: "unix:///nowhere/agent.sock"},
		"IPv4 loopback":      {Address: "127.0.0.1:1", PlaintextLoopback: true},
		"IPv6 loopback":      {Address: "[::1]:1", PlaintextLoopback: true},
		"localhost":          {Address: "dns:///localhost:1", PlaintextLoopback: true},
		"another 127 number": {Address: "127.1.2.3:1", PlaintextLoopback: true},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := client.New(options)
			require.NoError(t, err)
			require.NoError(t, c.Close())
		})
	}
}
