package fakeserver

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	"github.com/karpenter-capi/karpenter-capi/pkg/cmd/internal/program"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent/scenario"
)

// refresh is how often certificate files are read again.
const refresh = 5 * time.Second

// serve plays the scenario until the context ends.
func serve(ctx context.Context, o *options, s *scenario.Scenario, log io.Writer) error {
	logger := newLogger(log)
	authority, err := fakeagent.NewAuthority(time.Now())
	if err != nil {
		return err
	}
	// Before the certificates are written: they may be those of another one that has the address.
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", o.listenAddress)
	if err != nil {
		return fmt.Errorf("--listen-address: %w", err)
	}
	security, config, stop, err := o.tls(authority, s, logger)
	if err != nil {
		_ = listener.Close() // The error of the certificates is returned.
		return err
	}
	defer stop()
	play, err := s.Start(scenario.Options{Logger: logger, Authority: authority, Version: program.Version()})
	if err != nil {
		_ = listener.Close() // The scenario's error is returned.
		return err
	}
	defer play.Close()
	grants := play.Grants
	if o.controlAddress != "" {
		c := newControlled(play.Agent, authority, cmp.Or(s.TrustDomain, fakeagent.TrustDomain))
		address, stop, err := serveControl(ctx, o.controlAddress, c)
		if err != nil {
			_ = listener.Close() // As above.
			return err
		}
		defer stop()
		grants = func(id string) []fakeagent.Grant { return append(c.Grants(id), play.Grants(id)...) }
		logger.Info("control", "url", "http://"+address.String())
	}
	gated := play.Listener(listener)
	if config == nil {
		play.Agent.Serve(gated)
	} else {
		play.Agent.ServeTLS(gated, config, grants)
	}
	logger.Info("serving", "address", listener.Addr().String(), "security", security)
	<-ctx.Done()
	return nil
}

// tls returns the TLS configuration of the listener, or nil without TLS.
func (o *options) tls(authority *fakeagent.Authority, s *scenario.Scenario, logger logr.Logger) (
	security string, config *tls.Config, stop func(), err error,
) {
	switch {
	case o.plaintextLoopback:
		return "none, loopback only", nil, func() {}, nil
	case o.certificatesDir != "":
		pair, err := writeCertificates(o.certificatesDir, authority, s, o.serverNames)
		if err != nil {
			return "", nil, nil, fmt.Errorf("--certificates-dir: %w", err)
		}
		config = &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, ClientCAs: authority.Pool()}
		return "mutual TLS, certificates in " + o.certificatesDir, config, func() {}, nil
	}
	followed := certificates.Follow(certificates.Files{
		CertFile: o.certFile, KeyFile: o.keyFile, CAFile: o.clientCAFile, Refresh: refresh, Logger: logger,
	})
	// Unusable files must fail the start rather than the first handshake.
	if _, err = followed.Certificate(); err == nil {
		_, err = followed.Authorities()
	}
	if err != nil {
		followed.Close()
		return "", nil, nil, err
	}
	config = &tls.Config{
		MinVersion: tls.VersionTLS13,
		// Each handshake uses the current files.
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			authorities, err := followed.Authorities()
			if err != nil {
				return nil, err
			}
			certificate, err := followed.Certificate()
			if err != nil {
				return nil, err
			}
			return &tls.Config{
				MinVersion: tls.VersionTLS13, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: authorities,
				Certificates: []tls.Certificate{*certificate}, NextProtos: []string{"h2"},
			}, nil
		},
	}
	return "mutual TLS", config, followed.Close, nil
}

// newLogger returns a logger that writes a line for each event.
func newLogger(to io.Writer) logr.Logger {
	return funcr.New(func(prefix, args string) { fmt.Fprintln(to, "fake-agent:"+prefix, args) }, funcr.Options{})
}
