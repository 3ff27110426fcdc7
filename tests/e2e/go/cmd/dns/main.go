// dns answers names of Services and pods of a cluster, as CoreDNS would: A, AAAA, SRV, PTR, and CNAME for Services of
// type ExternalName.
package main

import (
	"context"
	"encoding/binary"
	"flag"
	"io"
	"log"
	"net"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	// Answers by UDP that are longer are truncated, and asked for again by TCP.
	longestDatagram = 1232
	longestMessage  = 65535
	idle            = 10 * time.Second
	secondsToLive   = 5
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "who it is for the API server")
	listen := flag.String("listen", ":53", "where it serves, by UDP and TCP")
	flag.Parse()
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		log.Fatal(err)
	}
	factory := informers.NewSharedInformerFactory(kubernetes.NewForConfigOrDie(config), 0)
	names := names{factory.Core().V1().Services().Lister(), factory.Discovery().V1().EndpointSlices().Lister()}
	ctx := context.Background()
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	packets, err := net.ListenPacket("udp", *listen)
	if err != nil {
		log.Fatal(err)
	}
	connections, err := net.Listen("tcp", *listen)
	if err != nil {
		log.Fatal(err)
	}
	log.Print("serving on ", *listen)
	go names.serveConnections(connections)
	names.serveDatagrams(packets)
}

func (n names) serveDatagrams(packets net.PacketConn) {
	for {
		query := make([]byte, 4096)
		length, from, err := packets.ReadFrom(query)
		if err != nil {
			log.Fatal(err)
		}
		go func() {
			answer, err := n.reply(query[:length], longestDatagram)
			if err == nil {
				_, err = packets.WriteTo(answer, from)
			}
			if err != nil {
				log.Print(err)
			}
		}()
	}
}

func (n names) serveConnections(connections net.Listener) {
	for {
		connection, err := connections.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go func() {
			defer connection.Close()
			if err := n.serveConnection(connection); err != nil && err != io.EOF {
				log.Print(err)
			}
		}()
	}
}

// serveConnection answers queries, each of which follows its length, until there is none.
func (n names) serveConnection(connection net.Conn) error {
	for {
		if err := connection.SetDeadline(time.Now().Add(idle)); err != nil {
			return err
		}
		var length [2]byte
		if _, err := io.ReadFull(connection, length[:]); err != nil {
			return err
		}
		query := make([]byte, binary.BigEndian.Uint16(length[:]))
		if _, err := io.ReadFull(connection, query); err != nil {
			return err
		}
		answer, err := n.reply(query, longestMessage)
		if err != nil {
			return err
		}
		answer = append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...)
		if _, err := connection.Write(answer); err != nil {
			return err
		}
	}
}

// reply makes the answer to a query, which says that it is truncated if it would be longer than the limit.
func (n names) reply(query []byte, limit int) ([]byte, error) {
	var parser dnsmessage.Parser
	header, err := parser.Start(query)
	if err != nil {
		return nil, err
	}
	question, err := parser.Question()
	if err != nil {
		return nil, err
	}
	found := n.lookup(question.Name.String())
	answer, err := n.message(header, question, found, false)
	if err == nil && len(answer) > limit {
		answer, err = n.message(header, question, found, true)
	}
	return answer, err
}

func (n names) message(
	query dnsmessage.Header, question dnsmessage.Question, found answer, truncated bool,
) ([]byte, error) {
	name := strings.ToLower(question.Name.String())
	header := dnsmessage.Header{
		ID:                 query.ID,
		Response:           true,
		Authoritative:      strings.HasSuffix(name, "."+zone+".") || strings.HasSuffix(name, ".arpa."),
		Truncated:          truncated,
		RecursionDesired:   query.RecursionDesired,
		RecursionAvailable: true,
	}
	if !found.exists {
		header.RCode = dnsmessage.RCodeNameError
	}
	builder := dnsmessage.NewBuilder(nil, header)
	builder.EnableCompression()
	if err := builder.StartQuestions(); err != nil {
		return nil, err
	}
	if err := builder.Question(question); err != nil {
		return nil, err
	}
	if err := builder.StartAnswers(); err != nil {
		return nil, err
	}
	if !truncated {
		if err := n.resources(&builder, question, found); err != nil {
			return nil, err
		}
	}
	return builder.Finish()
}

// resources writes the records of the type that the question is for.
func (n names) resources(builder *dnsmessage.Builder, question dnsmessage.Question, found answer) error {
	header := dnsmessage.ResourceHeader{Name: question.Name, Class: dnsmessage.ClassINET, TTL: secondsToLive}
	addresses := found.addresses
	if found.alias != "" {
		alias, err := dnsmessage.NewName(found.alias)
		if err != nil {
			return err
		}
		if err := builder.CNAMEResource(header, dnsmessage.CNAMEResource{CNAME: alias}); err != nil {
			return err
		}
		header.Name, addresses = alias, n.lookup(found.alias).addresses
	}
	switch question.Type {
	case dnsmessage.TypeA, dnsmessage.TypeAAAA:
		for _, ip := range addresses {
			var err error
			if question.Type == dnsmessage.TypeA && ip.Is4() {
				err = builder.AResource(header, dnsmessage.AResource{A: ip.As4()})
			} else if question.Type == dnsmessage.TypeAAAA && ip.Is6() {
				err = builder.AAAAResource(header, dnsmessage.AAAAResource{AAAA: ip.As16()})
			}
			if err != nil {
				return err
			}
		}
	case dnsmessage.TypeSRV:
		for _, server := range found.servers {
			target, err := dnsmessage.NewName(server.name)
			if err != nil {
				return err
			}
			record := dnsmessage.SRVResource{Weight: 100, Port: server.port, Target: target}
			if err := builder.SRVResource(header, record); err != nil {
				return err
			}
		}
	case dnsmessage.TypePTR:
		if found.name == "" {
			return nil
		}
		name, err := dnsmessage.NewName(found.name)
		if err != nil {
			return err
		}
		return builder.PTRResource(header, dnsmessage.PTRResource{PTR: name})
	}
	return nil
}
